"""BiLD against a reference that knows nothing of the engine; its switches, its statistics, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from few import crossed, few
from generate_driver import left_pad, noisy, prompts, same
from reference_bild import Reference, Told
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import NoRepeatNGramLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper
from tree_paths import scored_tree
from zoo import MEMBERS, build

import draftree
from draftree.acceptance import LossyBiLD
from draftree.drafting import BiLD, DraftModel
from draftree.engine import Engine, SamplingParams, generate
from draftree.shaping import Fixed
from draftree.tree import TokenTree

NEW = 24
LENGTHS = (9, 4, 14)
VARIED = (NoRepeatNGramLogitsProcessor(2),)  # greedy answers of these tiny models are one token over and over
DRAWN = (TemperatureLogitsWarper(0.9), TopKLogitsWarper(30))
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "varied": {"processors": VARIED},
    "sampled": {"processors": DRAWN, "seed": 11},
    "no-fallback": {"processors": VARIED, "fallback": 0.0, "turn": 4, "rollback": 2.5},
    "no-rollback": {"processors": VARIED, "rollback": None},
}


def pair(name: str, ends: Sequence[int]) -> tuple[Any, Any]:
    """A large and a small model that mostly agree, with these end tokens."""
    made = [copy.deepcopy(model) for model in (build(name), noisy(name))]
    for model in made:
        model.generation_config.eos_token_id = list(ends)
    return made[0], made[1]


def start_of(name: str, row: Sequence[int]) -> tuple[list[int], list[int] | None]:
    """(what the decoder begins with, what the encoder reads)."""
    if MEMBERS[name].encoder_decoder:
        return [build(name).config.decoder_start_token_id], list(row)
    return list(row), None


def reference(name: str, models: tuple[Any, Any], row: Sequence[int], **case: Any) -> Told:
    seed = case.pop("seed", None)
    noise = None
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.stack([torch.empty(1, 97).exponential_(1, generator=generator)[0] for _ in range(NEW + 12)])
    prompt, source = start_of(name, row)
    settings: dict[str, Any] = {"fallback": 0.12, "rollback": 3.0} | case
    return Reference(*models, noise=noise, **settings).write(prompt, NEW, source)


def ours(name: str, models: tuple[Any, Any], rows: Sequence[Sequence[int]], slots: int, **case: Any) -> list[Any]:
    seed, processors = case.pop("seed", None), case.pop("processors", ())
    ends = case.pop("ends", ())
    named = {"fallback": "fallback_threshold", "rollback": "rollback_threshold", "turn": "num_draft_tokens"}
    settings = {"fallback_threshold": 0.12, "rollback_threshold": 3.0}
    settings |= {named.get(key, key): value for key, value in case.items()}
    engine = Engine(models[0], drafter=BiLD(models[1], **settings), slots=slots)
    made = []
    for row in rows:
        prompt, source = start_of(name, row)
        params = SamplingParams(
            max_new_tokens=NEW,
            eos_token_ids=tuple(ends),
            sample=seed is not None,
            seed=seed,
            processors=LogitsProcessorList(processors),
        )
        encoder_input = None if source is None else torch.tensor(source)
        made.append(engine.add(prompt, params, encoder_input=encoder_input))
    engine.run()
    assert all(request.error is None for request in made)
    return made


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize(
    ("name", "case"), [*crossed(["llama", "t5"], CASES), *few([("gpt2", "varied"), ("bart", "varied")], [])]
)
def test_texts_and_counts_are_the_references(name: str, case: str) -> None:
    """In ragged batches whose requests join and leave, and alone."""
    rows, settings = prompts(LENGTHS), CASES[case]
    models = pair(name, ())
    expected = [reference(name, models, row, **settings) for row in rows]
    for slots in (1, 2):
        for request, told in zip(ours(name, models, rows, slots, **settings), expected, strict=True):
            stats = request.stats
            assert request.tokens == told.tokens
            assert (stats.steps, stats.accepted, stats.drafted) == (told.calls, told.kept, told.drafted)
            assert stats.rollbacks == told.rollbacks
    assert sum(told.kept for told in expected) > 5
    assert case in ("greedy", "no-rollback") or sum(told.rollbacks for told in expected) > 0
    assert case == "no-fallback" or sum(told.fallbacks for told in expected) > 0


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_small_models_end_is_reviewed(name: str) -> None:
    """The ends are tokens that the small model likes to say and the large one often takes back."""
    rows, settings = prompts((9, 4, 14, 6), seed=8), {"processors": VARIED, "fallback": 0.05}
    unended = pair(name, ())
    said = [reference(name, unended, row, **settings, rollback=None).tokens for row in rows]
    ends = tuple({tokens[6] for tokens in said} - {tokens[0] for tokens in said})
    models = pair(name, ends)
    expected = [reference(name, models, row, ends=ends, rollback=2.0, **settings) for row in rows]
    for slots in (1, 3):
        made = ours(name, models, rows, slots, ends=ends, rollback=2.0, **settings)
        for request, told in zip(made, expected, strict=True):
            assert request.tokens == told.tokens
            assert request.stats.steps == told.calls
    assert any(told.tokens[-1] in ends for told in expected)
    assert expected != [reference(name, models, row, ends=ends, rollback=None, **settings) for row in rows]


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize(
    ("options", "name"), crossed([{}, {"do_sample": True, "temperature": 0.8, "seed": 5}], ["llama", "t5", "bart"])
)
def test_lossless_is_the_large_models_text(name: str, options: dict[str, Any]) -> None:
    ids, mask = left_pad(prompts(LENGTHS))
    if MEMBERS[name].encoder_decoder:
        ids, mask = ids.flip(1), mask.flip(1)
    options = options | {"max_new_tokens": NEW, "no_repeat_ngram_size": 3}
    expected = generate(build(name), ids, mask, **options)
    for fallback in (0.0, 0.1):
        drafter = BiLD(noisy(name), fallback, rollback_threshold=None, lossless=True, num_draft_tokens=4)
        out = generate(build(name), ids, mask, drafter=drafter, **options)
        same(out.sequences, expected.sequences)
        assert out.stats.total.accepted > 0
        assert set(out.stats.total.accepted_by_source) == {"bild-lossless"}


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_small_model_stops_where_it_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what is new and writes its chain, and the word that it is not sure of; nothing behind that."""
    drafter = BiLD(noisy(name), 0.24, None, lossless=True, num_draft_tokens=10)
    runner = drafter._small.runner
    runs: list[tuple[int, int]] = []
    passes: list[int] = []
    run, grow = runner.run, drafter._grow

    def counted(*given: Any) -> Any:
        passes.append(1)
        return run(*given)

    def watched(*given: Any) -> Any:
        passes.clear()
        trees = grow(*given)
        if passes:
            runs.append((len(passes), trees.sizes[0] - 1))
        return trees

    monkeypatch.setattr(runner, "run", counted)
    monkeypatch.setattr(drafter, "_grow", watched)
    generate(build(name), torch.tensor(prompts((9,))), drafter=drafter, max_new_tokens=40, eos_token_id=[])
    # The first pass reads the text; each further one reads the token that was written last.
    assert all(made == min(written + 1, 10) for made, written in runs)
    assert any(written < 10 for _, written in runs)
    assert any(written > 0 for _, written in runs)


def test_hugging_faces_door() -> None:
    """The whole batch through `model.generate`, whose custom loops see an encoder's output and not its source."""
    for name in ("llama", "t5"):
        ids, mask = left_pad(prompts(LENGTHS))
        if MEMBERS[name].encoder_decoder:
            ids, mask = ids.flip(1), mask.flip(1)
        options = {"max_new_tokens": 12, "no_repeat_ngram_size": 3, "do_sample": False}
        drafter = BiLD(noisy(name), 0.05, 2.0)
        expected = generate(build(name), ids, mask, drafter=drafter, **options)
        seen = []
        loop = draftree.custom_generate(drafter, on_stats=seen.append)
        out = build(name).generate(ids, attention_mask=mask, custom_generate=loop, **options)
        same(out, expected.sequences)
        assert seen[0].total.accepted == expected.stats.total.accepted > 0
        assert set(seen[0].total.accepted_by_source) == {"bild-lossy"}
        twice = build(name).generate(
            ids, attention_mask=mask, custom_generate=loop, **options | {"do_sample": True}, num_return_sequences=2
        )
        assert twice.shape[0] == 2 * len(ids)


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_speculative_sampling_with_a_fixed_window_is_a_draft_model(name: str) -> None:
    """Chains of exactly so many tokens, a pass each, whatever the small model thinks of them."""
    prompt, source = start_of(name, prompts((9,))[0])
    encoder_input = None if source is None else torch.tensor(source)
    large, small = pair(name, ())  # an end token ends a draft
    params = SamplingParams(max_new_tokens=NEW)
    alone = Engine(large)
    plain = alone.add(prompt, params, encoder_input=encoder_input)
    alone.run()
    for window in (3, 10):
        drafter = DraftModel(small, depth=window, branching=1, confidence=0)
        engine = Engine(large, drafter=drafter, shape=Fixed(window))
        request = engine.add(prompt, params, encoder_input=encoder_input)
        while engine.busy:
            before, room = request.stats.drafted, request.context.remaining
            engine.step()
            assert request.stats.drafted - before == min(window, room - 1)
        assert request.tokens == plain.tokens
        assert 0 < request.stats.accepted < request.stats.drafted or name == "t5"


# ------------------------------------------------------------------------------- the rule alone


def scored(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows).log()


def drafted_by(rule: LossyBiLD, chain: Sequence[int], logits: Tensor) -> list[int | None]:
    tree = TokenTree.from_paths(0, [list(chain)])
    return [token for _, token, _ in rule.walk(scored_tree(tree, 0, logits), None)]


def test_the_rule_by_hand() -> None:
    logits = scored([0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.1, 0.5, 0.4])
    assert drafted_by(LossyBiLD(1.7), [1, 1], logits) == [1, 1, 1]  # -log 0.2 = 1.61
    assert drafted_by(LossyBiLD(1.6), [1, 1], logits) == [0]
    assert drafted_by(LossyBiLD(1.7), [1, 2], logits) == [1, 1]
    assert drafted_by(LossyBiLD(0.0), [0, 1], logits) == [0, 1, 1]  # what the large model says itself is never cut
    assert drafted_by(LossyBiLD(math.inf), [2, 2], logits) == [2, 2, 1]
    assert drafted_by(LossyBiLD(math.inf), [-1, 1], logits) == [0]  # a rejected draft


# ------------------------------------------------------------------------------- statistics and refusals


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
def test_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    out = generate(
        build("llama"), torch.tensor(prompts((9,))), drafter=BiLD(noisy("llama"), 0.1, 2.0), max_new_tokens=20
    )
    total = out.stats.total
    assert total.calls_per_token == total.steps / 20
    assert total.engagement == pytest.approx(1 - total.accepted / 20)
    assert total.rollback_ratio == total.rollbacks / total.steps
    assert set(total.accepted_by_source) == {"bild-lossy"}
    assert f"{total.engagement:.0%}" in out.stats.summary()
    assert {"calls_per_token", "engagement", "rollback_ratio"} <= total.as_dict().keys()


def test_what_does_not_go_with_it() -> None:
    model, drafter = build("llama"), BiLD(noisy("llama"))
    for options, words in (
        ({"shape": Fixed(4)}, "leave shape out"),
        ({"acceptance": draftree.LossyTypical()}, "leave acceptance out"),
        ({"strict": True}, "which BiLD changes"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(model, drafter=drafter, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lossy"):
        draftree.Merge([drafter, draftree.PromptLookup()])


@pytest.mark.parametrize(
    "options",
    [
        {"fallback_threshold": -0.1},
        {"fallback_threshold": 1.5},
        {"fallback_threshold": math.nan},
        {"rollback_threshold": -1.0},
        {"rollback_threshold": math.nan},
        {"num_draft_tokens": 0},
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(give|choose)"):
        BiLD(noisy("llama"), **options)


def test_pairs_that_do_not_fit(demo: Any) -> None:
    for large, small, words in (
        (build("t5"), noisy("llama"), "the small one is not"),
        (build("llama"), noisy("t5"), "no source for it"),
        (demo.model, noisy("llama"), "vocabulary of 97"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(large, drafter=BiLD(small))


def test_sources_that_the_small_model_cannot_read() -> None:
    small = copy.deepcopy(noisy("bart"))
    small.config.max_position_embeddings = 6
    ids = torch.tensor(prompts((9,)))
    with pytest.raises(ValueError, match="encoder reads 6"):
        generate(build("bart"), ids, drafter=DraftModel(small), max_new_tokens=4)
    engine = Engine(build("t5"), drafter=BiLD(noisy("t5")))
    request = engine.add([0], encoder_states=torch.zeros(4, 64))
    engine.run()
    assert "encoder_input" in str(request.error)


@pytest.mark.parametrize("option", ["fallback_threshold", "rollback_threshold"])
def test_thresholds_are_numbers(option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} is a str: pass a number"):
        BiLD(build("llama"), **{option: "0.5"})
