"""ProPD's trees as published: one size for a batch, by the line, chosen again only where the situation has shifted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from zoo import build

from benchmarks.papers.propd_shape import SHIFT, ProPDTree
from draftree.drafting import HiddenTransfer, Medusa, PromptLookup, RequestState
from draftree.drafting.base import StepPlan
from draftree.drafting.in_model import Candidates
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Outcome

FLAT = StepCost((1, 2, 33), (1.0, 1.0001, 1.002))
STEEP = StepCost((1, 2, 33), (1.0, 2.0, 33.0))  # a row costs what a token brings


CANDIDATES = np.arange(1, 9).reshape(4, 2)  # of four depths, the best one and the next of each


class World:
    """Heads whose candidates are always `CANDIDATES`, and a sizer of their trees."""

    def __init__(self, cost: StepCost, max_nodes: int = 8) -> None:
        self.drafter = Medusa.fresh(build("llama"), heads=4, candidates=2)
        self.sizer = ProPDTree(max_nodes).bind(cost, self.drafter)

    def step(self, texts: list[list[int]], room: int = 100) -> StepPlan:
        """One step of new requests with these texts."""
        requests = [RequestState(i, text, 1, room) for i, text in enumerate(texts)]
        for request in requests:
            held = Candidates(len(request.tokens), CANDIDATES, np.zeros(CANDIDATES.shape, np.float32))
            self.drafter._held[request.id] = held
        plan = self.sizer.plan(requests, 64)
        drafted = self.drafter.draft(requests, plan.budgets)
        return self.sizer.trim(plan, drafted)

    def sizes(self, lengths: list[int]) -> list[int]:
        """Draft tokens of a step of requests with texts of these lengths."""
        plan = self.step([[9] * length for length in lengths])
        assert plan.trees is not None
        return [size - 1 for size in plan.trees.sizes]


def test_rows_that_are_free_are_all_taken_and_dear_ones_are_not() -> None:
    assert World(FLAT).sizes([10]) == [8]
    assert World(STEEP).sizes([10]) == [1]
    assert World(FLAT).sizes([10, 12]) == [8, 8]


def test_the_size_is_chosen_again_when_the_batch_or_the_length_has_shifted() -> None:
    world = World(FLAT)
    assert world.sizes([10]) == [8]
    whole = world.step([[9] * 10])
    assert whole.trees is not None
    for size in (8, 1) * 200:  # each draft token turns out to take half a step
        plan = replace(whole, trees=whole.trees.best(size))
        world.sizer.observe(plan, Outcome([[0]], 1 + size, 1.0 + 0.5 * size, 0.0))
    assert world.sizes([10]) == [8]  # the situation is the same
    assert world.sizes([10 + SHIFT])[0] < 4


def learned(world: World, truth: list[int]) -> None:
    """Two hundred texts that go on so."""
    for _ in range(200):
        plan = world.step([[9]])
        plan.requests[0].tokens.extend(truth)
        world.sizer.observe(plan, Outcome([[0]], 9, None, 0.0))
        world.sizer.end(plan.requests[0])


def test_the_product_is_over_every_rank_and_learned_from_the_text() -> None:
    """The second candidate of the first depth was always right: its place comes before all others."""
    world = World(STEEP)
    learned(world, [2, 3, 5, 7])
    trees = world.step([[9]]).trees
    assert trees is not None
    assert trees.tokens[0, 1] == 2


def test_a_share_is_of_its_depth_alone_whatever_was_drafted_or_accepted() -> None:
    """Paths of second candidates were never in a tree of one draft token, and their shares are known all the same."""
    world = World(STEEP)
    learned(world, [8, 4, 6, 7])  # wrong, second, second, best
    assert world.sizer._shares.of_place.round(1).tolist() == [[0, 0], [0, 1], [0, 1], [1, 0]]


def test_depths_that_a_request_has_no_room_for_are_left_out() -> None:
    trees = World(FLAT).step([[9]], room=3).trees
    assert trees is not None
    assert trees.height == 2


def test_a_tree_costs_its_drafters_rows() -> None:
    """The line begins at what passes over the tree and the rows behind its nodes take, for all requests together."""
    cost = StepCost((1, 2, 200), (1.0, 2.0, 200.0))
    drafter = HiddenTransfer.fresh(build("llama"))
    sizer = ProPDTree(8).bind(cost, drafter)
    assert sizer._line(2).of(np.array([3]))[0] == pytest.approx(drafter.rows(8, 2), rel=0.01)


def test_a_pruned_tree_costs_the_rows_that_its_pass_amounts_to() -> None:
    """Else a size that pays only where it is pruned is never met, and nothing is ever pruned."""

    class Worth:
        def rows(self, rows: np.ndarray) -> np.ndarray:
            return rows / 2

    cost = StepCost((1, 2, 200), (1.0, 2.0, 200.0))
    pruner: Any = SimpleNamespace(worth=Worth())
    heads = Medusa.fresh(build("llama"), heads=4, candidates=2)
    whole, pruned = (ProPDTree(8).bind(cost, heads, given)._line(1) for given in (None, pruner))
    sizes = np.array([3, 7])
    assert pruned.of(sizes) == pytest.approx(whole.of(sizes) / 2, rel=0.1)


def test_bad_options() -> None:
    heads = Medusa.fresh(build("llama"))
    with pytest.raises(ValueError, match="alpha is 0"):
        ProPDTree(alpha=0)
    with pytest.raises(ValueError, match="fading is -1"):
        ProPDTree(fading=-1)
    with pytest.raises(ValueError, match="share_alpha is 2"):
        ProPDTree(share_alpha=2)
    with pytest.raises(ValueError, match="what steps cost"):
        ProPDTree().bind(None, heads)
    with pytest.raises(ValueError, match="prompt-lookup has none"):
        ProPDTree().bind(FLAT, PromptLookup())
