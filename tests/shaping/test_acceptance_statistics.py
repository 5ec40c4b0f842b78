"""Acceptance statistics find how often draft tokens of each kind are accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.shaping.planner import BINS, CLASSES, HEAVY, WIDTH, AcceptanceStatistics, cells_of


def test_cells_tell_rank_and_confidence() -> None:
    cells = cells_of([-0.01, -0.01, -0.01, -0.01, -0.01, -0.01, -0.01])
    assert [cell % CLASSES for cell in cells] == [0, 1, 1, 2, 2, 2, 3]
    assert [cell // CLASSES for cell in cells_of([-0.1, -0.4, -2.0, -50.0])] == [0, 1, int(2.0 / WIDTH), BINS - 1]
    assert cells_of([-np.inf]) == [CLASSES * (BINS - 1)]
    assert cells_of([]) == []


@given(st.lists(st.floats(-8, 0), max_size=12))
def test_ranks_do_not_depend_on_the_order_of_nodes(logp: list[float]) -> None:
    """Whatever the order in a tree, a draft token has the cell that it has among the sorted ones; of equals any."""
    order = sorted(range(len(logp)), key=logp.__getitem__, reverse=True)
    assert sorted(cells_of(logp)) == sorted(cells_of([logp[i] for i in order]))
    found = cells_of(logp)
    assert [found[i] for i in order] == cells_of([logp[i] for i in order])


@pytest.mark.parametrize(("claimed", "rate"), [(-0.05, 0.4), (-0.05, 0.9), (-0.7, 0.1), (-4.0, 0.3)])
def test_shares_are_found_whatever_the_drafter_claims(claimed: float, rate: float) -> None:
    rng = np.random.default_rng(1)
    everyone, cells = AcceptanceStatistics(), cells_of([claimed])
    for _ in range(600):
        everyone.add(cells, [0] if rng.random() < rate else [])
    assert everyone.chances()[cells[0]] == pytest.approx(rate, abs=0.1)


def test_before_the_first_draft_token_the_drafter_is_believed() -> None:
    (cell,) = cells_of([-0.5])
    assert AcceptanceStatistics().chances()[cell] == pytest.approx(np.exp(-0.35 * 1.5))


def test_counts_fade() -> None:
    """A drafter that has become worse is found out, and cells that are no longer verified come back to its claims."""
    statistics, cells = AcceptanceStatistics(0.9), cells_of([-0.1])
    for _ in range(50):
        statistics.add(cells, [0])
    good = statistics.chances()[cells[0]]
    for _ in range(50):
        statistics.add(cells, [])
    bad = statistics.chances()[cells[0]]
    for _ in range(100):
        statistics.add(cells_of([-5.0]), [])
    assert good > 0.85
    assert bad < 0.3
    assert statistics.chances()[cells[0]] == pytest.approx(np.exp(-WIDTH / 2), abs=0.01)


def test_weights_stay_finite() -> None:
    """Counts are scaled down together, which changes no share."""
    statistics, twin, cells = AcceptanceStatistics(0.5), AcceptanceStatistics(0.5), cells_of([-0.1, -0.9])
    for step in range(1000):  # 0.5 ** -1000 is near the largest number
        statistics.add(cells, [0] if step % 3 else [])
    assert statistics._weight <= 2 * HEAVY
    for step in range(900, 1000):
        twin.add(cells, [0] if step % 3 else [])
    assert statistics.chances() == pytest.approx(twin.chances())
