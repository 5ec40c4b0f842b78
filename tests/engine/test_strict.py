"""Strict mode: 16-bit answers are bit for bit those of plain decoding alone, or strict mode is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from drafters_for_tests import InModel, RandomTree
from few import crossed, few
from generate_driver import prompts
from strict_driver import PROMPTS, flat, params_of, run
from zoo import MEMBERS, build, construct

from draftree.drafting import BiTA
from draftree.engine import Engine, SamplingParams
from draftree.shaping import Fixed

RUNNERS = [
    *((name, "cpu") for name in ("llama", "mistral-window", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "glm4")),
    *((name, "cuda_graphs") for name in ("llama", "mistral-window")),
]


@pytest.mark.parametrize(
    ("way", "sample"),
    few(itertools.product(RUNNERS, [False, True]), [*zip(RUNNERS[::2], itertools.cycle([False, True]), strict=False)]),
)
def test_strict_answers_are_those_of_plain_decoding_alone(way: tuple[str, str], sample: bool) -> None:
    """Scores are so close together that other bits give other tokens; in batches, too."""
    name, runner = way
    plain, _ = run(flat(name), runner, sample=sample)
    references = {tuple(p): r.tokens for p, r in zip(PROMPTS, plain, strict=True)}
    for slots in (1, 4):
        drafter = RandomTree(references, 3)
        strict, _ = run(flat(name), runner, sample=sample, drafter=drafter, strict=True, slots=slots)
        assert [r.tokens for r in strict] == [r.tokens for r in plain], slots
        assert sum(r.stats.accepted for r in strict) > 4 * len(PROMPTS)
    batch, _ = run(flat(name), runner, sample=sample, strict=True, slots=4)
    assert [r.tokens for r in batch] == [r.tokens for r in plain]


@pytest.mark.parametrize(
    ("name", "sample"),
    crossed(["llama", "qwen3", "glm4", "olmo2", "gemma", "mistral-window", "gemma2", "gemma3", "olmo3"], [False, True]),
)
def test_compiled_layers_do_not_need_it(name: str, sample: bool) -> None:
    """Rows are independent, so answers equal plain decoding's without strict mode, too."""
    model = flat(name)
    plain, engine = run(model, "auto", sample=sample)
    assert engine.runner.name == "cpu"
    references = {tuple(p): r.tokens for p, r in zip(PROMPTS, plain, strict=True)}
    for seed, slots in ((2, 1), (3, 3), (4, 4)):
        drafted, _ = run(model, "auto", sample=sample, drafter=RandomTree(references, seed), slots=slots)
        assert [r.tokens for r in drafted] == [r.tokens for r in plain], (seed, slots)
        assert sum(r.stats.accepted for r in drafted) > 4 * len(PROMPTS)


def test_capped_scores_are_refused_in_passes_of_fixed_shapes() -> None:
    with pytest.raises(ValueError, match="on the runner 'cuda_graphs', where scores depend on the other rows"):
        Engine(flat("gemma2"), runner="cuda_graphs", strict=True)


@pytest.mark.parametrize(("name", "runner"), [("gpt2", "auto"), ("llama", "hooked"), ("llama", "eager")])
def test_runners_that_compute_by_torch_are_refused_in_16_bits(name: str, runner: str) -> None:
    with pytest.raises(ValueError, match="scores depend on the other rows of a pass: use float32"):
        Engine(flat(name), runner=runner, strict=True)
    Engine(build(name), runner=runner, strict=True)  # float32 needs none of it


def test_a_deep_prefix_in_recorded_passes_is_refused() -> None:
    model = flat("mistral-window")
    drafter = BiTA.fresh(model, masks=2, prompts=5)
    plain, _ = run(model, "cpu")
    drafted, _ = run(model, "cpu", drafter=drafter, strict=True, slots=3)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    with pytest.raises(ValueError, match="in recorded passes with a drafter that has a deep prefix"):
        Engine(model, runner="cuda_graphs", drafter=drafter, strict=True)


@pytest.mark.parametrize("seed", range(2))
def test_windows_that_end_while_a_text_grows(seed: int) -> None:
    """Neither trees nor another request change a bit of a text."""
    torch.manual_seed(seed)
    model = construct(MEMBERS["mistral-window"], sliding_window=128).to(torch.bfloat16)
    short, long = prompts((20, 100), seed=seed)
    engine = Engine(model, runner="cpu")
    plain = engine.add(short, SamplingParams(max_new_tokens=90))
    engine.run()
    drafter = RandomTree({tuple(short): plain.tokens, tuple(long): plain.tokens}, 3)
    for options in ({"drafter": drafter, "shape": Fixed(12)}, {"slots": 2}):
        other = Engine(model, runner="cpu", **options)
        found = other.add(short, SamplingParams(max_new_tokens=90))
        if "slots" in options:
            other.add(long, SamplingParams(max_new_tokens=90))
        other.run()
        assert found.tokens == plain.tokens, options


def test_long_prompts_are_read_alone_and_in_chunks_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.engine.engine.PREFILL_CHUNK", 16)
    asked = prompts((9, 70, 23, 50, 41, 16), seed=3)
    model, texts = flat("llama"), []
    for prompt in asked:
        engine = Engine(model, slots=1, runner="cpu")
        texts.append(engine.add(prompt, params_of(0, False)))
        engine.run()
    references = {tuple(p): r.tokens for p, r in zip(asked, texts, strict=True)}
    engine = Engine(model, slots=3, runner="cpu", strict=True, drafter=RandomTree(references, 3), shape=Fixed(12))
    drafted = [engine.add(prompt, params_of(0, False)) for prompt in asked]
    engine.run()
    assert [r.tokens for r in drafted] == [r.tokens for r in texts]


@pytest.mark.parametrize(("runner", "kind", "sample"), crossed(["cpu", "hooked"], [RandomTree, InModel], [False, True]))
def test_fp32_changes_nothing(runner: str, kind: type[RandomTree], sample: bool) -> None:
    model = build("llama")
    plain, _ = run(model, runner, sample=sample)
    references = {tuple(p): r.tokens for p, r in zip(PROMPTS, plain, strict=True)}
    drafter = kind(references, 2)
    strict, _ = run(model, runner, sample=sample, drafter=drafter, strict=True)
    assert [r.tokens for r in strict] == [r.tokens for r in plain]
    assert sum(r.stats.accepted for r in strict) > 4 * len(PROMPTS)
