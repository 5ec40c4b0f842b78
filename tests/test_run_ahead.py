"""Running ahead in one call, against passes of one row."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_runner_growing import prompts
from torch import Tensor
from zoo import build

from draftree.runner import EagerRunner, HookedRunner, Runner, T5Runner, inspect_model, open_runner
from draftree.runner.cpu.ahead import AheadPlan
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import Plan

ONE = torch.ones(1, 1, 1, dtype=torch.bool)
GIVEN = [[5], [7, 9, 4], [3, 3]]


def step(runner: Runner, cache: SlotCache, slot: int, token: int, encoder: EncoderState | None = None) -> Tensor:
    """Log-probabilities [V] behind one more token."""
    plan = Plan(torch.tensor([[token]]), torch.tensor([[cache.lengths[slot]]]), ONE)
    result = runner.run(plan, cache, slot, encoder)
    cache.commit([[0]], result.segments)
    return result.logits[0, 0].log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "glm", "olmo2"])
@pytest.mark.parametrize("slots", [(0, 3), (1, 1)], ids=["ragged", "alone"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_as_pass_after_pass(family: str, slots: tuple[int, int], threads: int) -> None:
    runner = EagerRunner(inspect_model(build(family)))
    first, batch = slots
    cache, plain = runner.new_cache(3), runner.new_cache(3)
    prompts(runner, cache)
    prompts(runner, plain)
    lengths = list(cache.lengths)
    given = GIVEN[first : first + batch]
    torch.set_num_threads(threads)
    try:
        course = runner.run_ahead(AheadPlan(lengths[first : first + batch], given, 6, 4), cache, first)
    finally:
        torch.set_num_threads(1)
    assert course is not None
    assert np.shape(course.tokens) == np.shape(course.logp) == (batch, 6, 4)
    assert cache.lengths == lengths  # nothing is kept yet
    for b in range(batch):
        token = 0
        for s in range(6):
            token = given[b][s] if s < len(given[b]) else token
            best = step(runner, plain, first + b, token).topk(4)
            assert course.tokens[b][s] == best.indices.tolist()
            torch.testing.assert_close(torch.tensor(course.logp[b][s]), best.values, rtol=0, atol=2e-5)
            token = int(best.indices[0])
        cache.keep(first + b, lengths[first + b], list(range(6)))
    again = [step(runner, c, first, 11) for c in (cache, plain)]
    torch.testing.assert_close(again[0], again[1], rtol=0, atol=2e-5)


def test_where_it_stops() -> None:
    runner = EagerRunner(inspect_model(build("llama")))
    cache = runner.new_cache(3)
    prompts(runner, cache)

    def made(**options: object) -> int:
        course = runner.run_ahead(AheadPlan(cache.lengths, GIVEN, 6, 2, **options), cache)  # type: ignore[arg-type]
        assert course is not None
        return len(course.tokens[0])

    whole = runner.run_ahead(AheadPlan(cache.lengths, GIVEN, 6, 2), cache)
    assert whole is not None
    top, logp, paths = np.array(whole.tokens)[:, :, 0], np.array(whole.logp)[:, :, 0], np.zeros(3)
    assert made() == 6
    assert made(least=1.0) == 3  # what is given is read
    for s in range(6):
        free = s + 1 >= np.array([1, 3, 2])
        paths += np.where(free, logp[:, s], 0)
        if s == 3:
            assert made(least=float(paths.max()) - 1e-4) > 4
            assert made(least=float(paths.max()) + 1e-4) <= 4
    # The first two requests go on behind the third one's end; alone it does not.
    end = int(top[2, 1])
    assert made(ends=[end], taking_part=[False, False, True]) == 2
    assert made(ends=[96, end], taking_part=[False, False, True]) == 2
    assert made(ends=[end]) > 2
    assert made(ends=[end], taking_part=[False, False, True], least=-1e9) == 2
    assert made(taking_part=[False, False, True]) == 6


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"positions": [3]}, "2 requests has 1 positions"),
        ({"taking_part": [True]}, "1 marks of who takes part"),
        ({"given": [[5], []]}, "no token to begin with"),
        ({"steps": 0}, "steps is 0"),
        ({"best": 0}, "best is 0"),
    ],
)
def test_a_plan_that_cannot_be_run(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AheadPlan(**({"positions": [3, 4], "given": [[5], [7]], "steps": 2} | wrong))
    assert AheadPlan([3, 4], [[5], []], 2, taking_part=[True, False]).batch == 2


def test_runners_that_cannot() -> None:
    """Windows in reach, angles that depend on the length, and any model behind its own forward: passes do it."""
    for runner in (
        EagerRunner(inspect_model(build("mistral-window"))),
        EagerRunner(inspect_model(build("llama-dynamic"))),
        HookedRunner(inspect_model(build("llama"))),
    ):
        cache = runner.new_cache(3)
        prompts(runner, cache)
        assert runner.run_ahead(AheadPlan(cache.lengths, GIVEN, 6, 2), cache) is None


@pytest.mark.parametrize("each", [-0.5, -1.5])
def test_a_token_that_is_too_unlikely_ends_its_path(each: float) -> None:
    runner = EagerRunner(inspect_model(build("llama")))
    cache = runner.new_cache(3)
    prompts(runner, cache)
    free = runner.run_ahead(AheadPlan([cache.lengths[0]], [[5]], 12), cache)
    bound = runner.run_ahead(AheadPlan([cache.lengths[0]], [[5]], 12, each=each), cache)
    assert free is not None
    assert bound is not None
    said = [best[0] for best in free.logp[0]]
    until = next((i for i, logp in enumerate(said) if logp < each), 11) + 1
    assert bound.tokens[0] == free.tokens[0][:until]


@pytest.mark.parametrize("slots", [(0, 3), (1, 1)], ids=["ragged", "alone"])
@pytest.mark.parametrize("family", ["t5", "t5-gated", "mt5"])
def test_decoders_that_attend_to_a_source(family: str, slots: tuple[int, int]) -> None:
    """Behind texts and sources of different lengths, two of them padded, against the stock model's passes."""
    runner, stock = T5Runner(inspect_model(build(family))), HookedRunner(inspect_model(build(family)))
    first, batch = slots
    cache, plain, encoder = runner.new_cache(3), runner.new_cache(3), EncoderState(runner.target, 3)
    for slot, length in enumerate((12, 5, 70)):
        mask = torch.ones(length)
        mask[3 : 3 + slot] = 0
        encoder.admit(slot, torch.arange(length) % 90 + 3, mask)
        for token in [0, 40, 12, 50][: slot + 1]:
            for h, c in ((runner, cache), (stock, plain)):
                step(h, c, slot, token, encoder)
    lengths = list(cache.lengths)
    given = GIVEN[first : first + batch]
    course = runner.run_ahead(AheadPlan(lengths[first : first + batch], given, 7, 4), cache, first, encoder)
    assert course is not None
    for b in range(batch):
        token = 0
        for s in range(7):
            token = given[b][s] if s < len(given[b]) else token
            best = step(stock, plain, first + b, token, encoder).topk(4)
            assert course.tokens[b][s] == best.indices.tolist()
            torch.testing.assert_close(torch.tensor(course.logp[b][s]), best.values, rtol=0, atol=2e-4)
            token = int(best.indices[0])
        cache.keep(first + b, lengths[first + b], list(range(7)))
    again = [step(h, c, first, 11, encoder) for h, c in ((runner, cache), (stock, plain))]  # a pass behind a run
    torch.testing.assert_close(again[0], again[1], rtol=0, atol=2e-4)


def test_decoders_that_are_not_compiled() -> None:
    hooked = copy.deepcopy(build("t5"))
    hooked.decoder.block[1].register_forward_hook(lambda *_: None)
    other = copy.deepcopy(build("t5"))
    other.decoder.block[0].layer[2].DenseReluDense.wo = torch.nn.Sequential(torch.nn.Identity())
    for model in (build("bart"), build("umt5"), copy.deepcopy(build("t5")).bfloat16(), hooked, other):
        assert not T5Runner.qualifies(inspect_model(model))
        assert type(open_runner(model)) is HookedRunner
    assert type(open_runner(build("t5"))) is T5Runner
    assert type(open_runner(build("t5"), "hooked")) is HookedRunner
