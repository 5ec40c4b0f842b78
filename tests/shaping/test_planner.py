"""The chosen sizes are the best ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.shaping.planner import choose

probability = st.sampled_from([0.9, 0.6, 0.6, 0.3, 0.3, 0.05, 0.0])
trees = st.lists(st.lists(probability, max_size=5).map(lambda p: sorted(p, reverse=True)), min_size=1, max_size=3)
steps = st.lists(st.floats(0.0, 0.5), min_size=15, max_size=15)


@settings(max_examples=300, deadline=None)
@given(trees, steps)
def test_the_choice_is_the_best_of_all(chances: list[list[float]], rises: list[float]) -> None:
    """Against brute force over every allotment to requests; probabilities repeat, costs have steps."""
    seconds = (1 + np.concatenate([[0.0], np.cumsum(rises)])).tolist()

    def rate(sizes: tuple[int, ...]) -> float:
        gain = sum(sum(own[:n]) for own, n in zip(chances, sizes, strict=True))
        return float((len(chances) + gain) / seconds[sum(sizes)])

    chosen = choose(chances, seconds, packed=True)
    best = max(rate(sizes) for sizes in itertools.product(*(range(len(own) + 1) for own in chances)))
    assert rate(tuple(chosen)) == pytest.approx(best, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(trees, steps)
def test_padded_trees_share_one_width(chances: list[list[float]], rises: list[float]) -> None:
    """Where a smaller tree is padded to the largest, draft tokens in the padding are free."""
    batch = len(chances)
    seconds = (1 + np.concatenate([[0.0], np.cumsum(rises)])).tolist()

    def rate(width: int) -> float:
        return float((batch + sum(sum(own[:width]) for own in chances)) / seconds[batch * width])

    chosen = choose(chances, seconds, packed=False)
    widths = range(min(max(map(len, chances)), (len(seconds) - 1) // batch) + 1)
    width = max(chosen)
    assert chosen == [min(width, len(own)) for own in chances]
    assert rate(width) == pytest.approx(max(map(rate, widths)), rel=1e-9)


def test_a_batch_shares_rows_by_worth() -> None:
    chances = [[0.9, 0.8, 0.7, 0.6], [0.1, 0.05, 0.01, 0.01], [0.75, 0.2, 0.1]]
    seconds = [1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 9.0]
    assert choose(chances, seconds, packed=True) == [4, 0, 1]


def test_trees_stay_connected() -> None:
    """A likelier child is not taken without its parent, which its drafter put before it."""
    assert choose([[0.1, 0.9], [0.5]], [1.0, 1.2, 9.0, 9.0], packed=True) == [0, 1]
