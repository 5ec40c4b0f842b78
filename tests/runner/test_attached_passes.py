"""What drafters inside the model ask of compiled code, each against the same in tensor operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from few import crossed
from generate_driver import left_pad, prompts
from in_model_driver import MAKERS, make
from zoo import build

from draftree import DynamicTree, generate
from draftree.drafting.base import Step
from draftree.drafting.in_model import InModelDrafter
from draftree.native import load_library
from draftree.runner import open_runner
from draftree.runner.base import top_tokens
from draftree.runner.cpu.runner import CpuRunner
from draftree.runner.eager.runner import EagerRunner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import PassResult, Plan, Segment
from draftree.runner.step_cost import StepCost
from draftree.runner.target import inspect_model
from draftree.shaping import Fixed
from draftree.tree import TokenTree

pytestmark = pytest.mark.skipif(load_library() is None, reason="not built: python hatch_build.py")
CHEAP = StepCost((1, 64), (1.0, 1.2))


@pytest.fixture
def model() -> Any:
    return build("llama")


@pytest.mark.parametrize(("name", "sized"), crossed(MAKERS, ["fixed", "by cost"]))
def test_compiled_passes_with_attached_rows_are_those_in_tensors(
    name: str, sized: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged batches with rows that drafters attach: logits, tapped states and layouts of the rows."""
    found: list[tuple[Plan, PassResult, PassResult]] = []
    compiled, tensors = CpuRunner.run, EagerRunner(inspect_model(model))

    def both(self: CpuRunner, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        if not plan.plain:
            found.append((plan, compiled(self, plan, cache, first), tensors.run(plan, cache, first)))
        return compiled(self, plan, cache, first)  # writes the same positions again

    monkeypatch.setattr(CpuRunner, "run", both)
    drafter = make(name, model)
    shape = Fixed(6) if sized == "fixed" else DynamicTree(cost=CHEAP)
    ids, mask = left_pad(prompts())
    generate(model, ids, mask, drafter=drafter, shape=shape, max_new_tokens=12)
    assert len(found) > 3
    for plan, fast, slow in found:
        # Where a plan has `sizes`, rows beyond them are nobody's.
        real = slice(None) if plan.sizes is None else torch.arange(plan.width) < torch.tensor(plan.sizes)[:, None]
        torch.testing.assert_close(fast.logits[real], slow.logits[real], rtol=1e-4, atol=1e-4)
        assert fast.hidden.keys() == slow.hidden.keys()
        for layer, hidden in fast.hidden.items():
            torch.testing.assert_close(hidden[real], slow.hidden[layer][real], rtol=1e-4, atol=1e-4)
        assert len(fast.segments) == len(slow.segments) == 1 + len(plan.surgeries)
        for one, other in zip(fast.segments, slow.segments, strict=True):
            assert one.start == other.start
            assert torch.equal(one.positions, other.positions)
            assert torch.equal(one.visible, other.visible)


def test_the_likeliest_tokens_of_rows(model: Any) -> None:
    runner = open_runner(model)
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, model.config.hidden_size)
    rows = [[4, 0, -1], [1, -1, 3]]
    layers, everywhere = len(runner.target.layers), torch.ones(2, 5, 5, dtype=torch.bool)
    result = PassResult(hidden, [Segment(0, None, torch.zeros(2, 5), everywhere)], {layers: hidden}, runner)
    logits = Step([], TokenTree.roots(torch.tensor([1, 2])), result, [0, 0], 0).own_logits(layers, rows)
    assert logits is not None
    tokens, logp = top_tokens(logits, 4)
    truth = runner.logits(hidden).log_softmax(-1)
    for b, of_request in enumerate(rows):
        for place, row in enumerate(of_request):
            if row >= 0:
                expected = truth[b, row].topk(4)
                assert tokens[b, place].tolist() == expected.indices.tolist()
                assert np.allclose(logp[b, place], expected.values.numpy(), atol=1e-4)
    assert np.isneginf(logp[0, 2]).all()
    assert tokens[0, 2].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_rows_lie_behind_the_context_in_their_order(dtype: torch.dtype) -> None:
    cache = SlotCache(3, 2, 32)
    cache.open(0, 2, 8)
    given = [tuple(torch.randn(2, 2, 8, 4, dtype=dtype) for _ in ("keys", "values")) for _ in range(3)]
    for layer, (keys, values) in enumerate(given):
        cache.update(keys, values, layer)
    positions = torch.zeros(2, 8, dtype=torch.long)
    kept = [[0, 1, 4, 7], [2, 3]]
    cache.commit(kept, [Segment(0, None, positions, torch.ones(2, 8, 8, dtype=torch.bool))])
    cache.open(0, 2, 8)
    for layer, of_layer in enumerate(given):
        for held, written in zip(cache.views(layer, 4), of_layer, strict=True):
            for b, rows in enumerate(kept):
                assert torch.equal(held[b, :, : len(rows)], written[b, :, rows])


@pytest.mark.parametrize("name", ["hidden-transfer", "bita", "medusa"])
def test_where_draft_tokens_pay_rows_are_attached_to_every_pass(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But to the last one, behind which there is nothing to draft; and the text is the same."""
    ids = torch.tensor(prompts((9,)))
    plain = generate(model, ids, max_new_tokens=60).sequences
    drafter: InModelDrafter = make(name, model)

    def knowing(step: Any) -> Any:  # the draft tokens are right, so that it pays
        length = len(step.requests[0].tokens)
        rest = plain[0, length:].tolist()[: drafter.depth]
        rest += [0] * (drafter.depth - len(rest))
        tokens = np.array([[[token, *(t for t in range(20) if t != token)][:8] for token in rest]])
        return tokens, np.tile(np.log(np.array([0.9] + [0.01] * 7, np.float32)), (1, drafter.depth, 1))

    monkeypatch.setattr(drafter, "likeliest", knowing)
    attached: list[bool] = []
    plan = drafter.plan

    def watched(step: Any) -> Any:
        attached.append(plan(step) is not None)
        return plan(step)

    monkeypatch.setattr(drafter, "plan", watched)
    out = generate(model, ids, drafter=drafter, shape=DynamicTree(cost=CHEAP), max_new_tokens=60)
    assert torch.equal(out.sequences, plain)
    assert out.stats.acceptance_length > 1.5
    assert attached[:-1] == [True] * (len(attached) - 1)
