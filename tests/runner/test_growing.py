"""Trees that grow over several passes: rows are committed by depth, and later rows see only their own branch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo import build

from draftree.runner import CpuRunner, HookedRunner, Runner, choose, inspect_model
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Plan

CONTEXTS = (1, 9, 30)
PARENTS = ((-1, -1, -1), (0, 0, 2), (4, 5, 3))  # by depth; numbers count all nodes of the tree
NODES = [parent for level in PARENTS for parent in level]
DEPTH = [depth for depth, level in enumerate(PARENTS) for _ in level]


def runner_of(name: str) -> Runner:
    family, kind = name.split("-")
    model = build(family)
    target = inspect_model(model)
    return choose(target, kind)(target)


def ancestors() -> Tensor:
    """Return the ancestors of each node and the node itself, BoolTensor [9, 9]."""
    seen = torch.eye(len(NODES), dtype=torch.bool)
    for node, parent in enumerate(NODES):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def prompts(runner: Runner, cache: SlotCache) -> None:
    generator = torch.Generator().manual_seed(1)
    for slot, length in enumerate(CONTEXTS):
        tokens = torch.randint(3, 97, (1, length), generator=generator)
        causal = torch.ones(1, length, length, dtype=torch.bool).tril()
        result = runner.run(Plan(tokens, torch.arange(length)[None], causal), cache, slot)
        cache.commit([list(range(length))], result.segments)


@pytest.mark.parametrize(
    "name", ["llama-cpu", "llama-eager", "llama-hooked", "llama-cuda_graphs", "gpt2-hooked", "gemma3-hooked"]
)
@pytest.mark.parametrize("slots", [(0, 3), (2, 1)], ids=["ragged", "alone"])
def test_a_tree_grown_by_depth_is_the_tree_of_one_pass(name: str, slots: tuple[int, int]) -> None:
    runner = runner_of(name)
    first, batch = slots
    tokens = torch.randint(3, 97, (batch, len(NODES)), generator=torch.Generator().manual_seed(2))
    seen = ancestors()
    starts = torch.tensor(CONTEXTS[first : first + batch])[:, None]
    whole, grown = runner.new_cache(3), runner.new_cache(3)
    for cache in (whole, grown):
        prompts(runner, cache)
    positions = starts + torch.tensor(DEPTH)
    expected = runner.run(Plan(tokens, positions, seen.expand(batch, -1, -1)), whole, first).logits
    for begin in range(0, len(NODES), 3):
        rows = slice(begin, begin + 3)
        visible = seen[rows, : begin + 3].expand(batch, -1, -1)
        result = runner.run(Plan(tokens[:, rows], positions[:, rows], visible), grown, first)
        torch.testing.assert_close(result.logits, expected[:, rows], rtol=0, atol=2e-5)
        grown.commit([[0, 1, 2]] * batch, result.segments)

    # One branch stays, and later rows see only that.
    for b in range(batch):
        grown.keep(first + b, CONTEXTS[first + b], [2, 5, 6])
    whole.commit([[2, 5, 6]] * batch, result.segments)
    assert grown.lengths == whole.lengths
    one = torch.ones(batch, 1, 1, dtype=torch.bool)
    last = [runner.run(Plan(tokens[:, :1], starts + 3, one), cache, first).logits for cache in (whole, grown)]
    torch.testing.assert_close(last[1], last[0], rtol=0, atol=2e-5)


def test_visible_may_cover_more_than_a_context() -> None:
    """A request whose context is shorter than the others' trees has True in the positions that it lacks."""
    runner = CpuRunner(inspect_model(build("llama")))
    hooked = HookedRunner(runner.target)
    logits = []
    for driver in (runner, hooked):
        cache = driver.new_cache(3)
        prompts(driver, cache)
        visible = torch.ones(3, 2, 14, dtype=torch.bool)
        visible[:, 0, 13] = False
        visible[1, 1, 11] = False  # the last committed position of the second request
        visible[2, 0, 0] = False  # the 12th last of the third
        positions = torch.tensor(CONTEXTS)[:, None] + torch.arange(2)
        logits.append(driver.run(Plan(torch.tensor([[5, 6]] * 3), positions, visible), cache).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=2e-5)
    plain = torch.ones(3, 2, 2, dtype=torch.bool).tril()
    cache = runner.new_cache(3)
    prompts(runner, cache)
    free = runner.run(Plan(torch.tensor([[5, 6]] * 3), positions, plain), cache).logits
    same = (free - logits[0]).abs().amax(-1) < 1e-6
    assert same.tolist() == [[True, True], [True, False], [False, False]]  # row 1 sees row 0, which has changed


def test_more_slots() -> None:
    runner = CpuRunner(inspect_model(build("llama")))
    cache = runner.new_cache(3)
    prompts(runner, cache)
    cache.exchange(0, 2)
    cache.exchange(1, 2)
    cache.widen(5)
    assert (cache.lengths, cache.slots) == ([30, 1, CONTEXTS[1], 0, 0], 5)
    one = torch.ones(2, 1, 1, dtype=torch.bool)
    logits = runner.run(Plan(torch.tensor([[7], [7]]), torch.tensor([[30], [1]]), one), cache).logits
    fresh = runner.new_cache(3)
    prompts(runner, fresh)
    for b, slot in enumerate((2, 0)):
        plan = Plan(torch.tensor([[7]]), torch.tensor([[CONTEXTS[slot]]]), one[:1])
        assert torch.equal(runner.run(plan, fresh, slot).logits[0], logits[b])
