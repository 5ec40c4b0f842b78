"""ProPD's trees as published: one size for a batch, by the line, chosen again only where the situation has shifted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.propd_shape import SHIFT, ProPDTree
from draftree.drafting import Context
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Outcome, Sizer
from draftree.tree import TokenTree

FLAT = StepCost((1, 2, 33), (1.0, 1.0001, 1.002))
STEEP = StepCost((1, 2, 33), (1.0, 2.0, 33.0))  # a row costs what a token brings


def bound(cost: StepCost) -> Any:
    return ProPDTree(8).bind(cost, None)  # type: ignore[arg-type]


def trees(batch: int = 1) -> TokenTree:
    """Candidates of four depths, the best one and the next of each."""
    tokens, parents = [1, 2, 3, 4, 5, 6, 7, 8], [-1, -1, 0, 0, 2, 2, 4, 4]
    one = TokenTree.from_arrays(tokens, parents, -np.arange(1.0, 9.0, dtype=np.float32), root=9)
    return TokenTree.stack([one] * batch)


def sizes(sizer: Sizer, lengths: list[int]) -> list[int]:
    """Draft tokens of a step of requests with texts of these lengths."""
    requests = [Context(i, [9] * length, 1, 100) for i, length in enumerate(lengths)]
    plan = sizer.plan(requests, 64)
    assert plan.budgets == [8] * len(lengths)
    done = sizer.trim(plan, trees(len(lengths)))
    assert done.trees is not None
    return [size - 1 for size in done.trees.sizes]


def test_rows_that_are_free_are_all_taken_and_dear_ones_are_not() -> None:
    assert sizes(bound(FLAT), [10]) == [8]
    assert sizes(bound(STEEP), [10]) == [1]
    assert sizes(bound(FLAT), [10, 12]) == [8, 8]


def test_the_size_is_chosen_again_when_the_batch_or_the_length_has_shifted() -> None:
    sizer = bound(FLAT)
    assert sizes(sizer, [10]) == [8]
    request = Context(0, [9] * 10, 1, 100)
    for size in (8, 1) * 200:  # each draft token turns out to take half a step
        plan = replace(sizer.plan([request], 64), trees=trees().best(size))
        sizer.observe(plan, Outcome([[0]], 1 + size, 1.0 + 0.5 * size, 0.0))
    assert sizes(sizer, [10]) == [8]  # the situation is the same
    assert sizes(sizer, [10 + SHIFT])[0] < 4


def test_the_product_is_over_every_rank_and_learned_from_the_text() -> None:
    """The second candidate of the first depth was always right: its place comes before all others."""
    sizer = bound(STEEP)
    for _ in range(200):
        request = Context(0, [9], 1, 100)
        plan = sizer.trim(sizer.plan([request], 64), trees())
        request.tokens += [2, 3, 5, 7]
        sizer.observe(plan, Outcome([[0]], 9, None, 0.0))
        sizer.end(request)
    request = Context(1, [9], 1, 100)
    done = sizer.trim(sizer.plan([request], 64), trees())
    assert done.trees is not None
    assert done.trees.tokens[0, 1] == 2


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="alpha is 0"):
        ProPDTree(alpha=0)
    with pytest.raises(ValueError, match="fading is -1"):
        ProPDTree(fading=-1)
    with pytest.raises(ValueError, match="what steps cost"):
        ProPDTree().bind(None, None)  # type: ignore[arg-type]
