"""Which guesses to have, by place and log-probability: what a cell holds, and which bring most tokens a second."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.drafting.base import LEAST_ENDS, wanted
from draftree.shaping.average import Average
from draftree.shaping.cells import above, cells_of, least_of, plain_reach, reach
from draftree.shaping.compiled import AHEAD, LEVELS, PARTS, library
from draftree.tree import TokenTree

BRANCHES = st.lists(st.integers(0, 40), max_size=12)


@given(BRANCHES, st.lists(st.integers(0, LEVELS), min_size=PARTS, max_size=PARTS))
def test_what_is_wanted_is_what_the_cells_hold(eighths: list[int], levels: list[int]) -> None:
    """Log-probabilities on the borders of bins too; levels never rise from part to part."""
    logp = -np.sort(np.array(eighths, dtype=np.float32)) / 8
    levels.sort(reverse=True)
    held = [cell % LEVELS < levels[cell // LEVELS] for cell in cells_of(logp)]
    assert wanted(logp, least_of(levels)) == sum(held)
    assert held == sorted(held, reverse=True)


def test_the_first_guess_has_a_part_of_its_own() -> None:
    cells = cells_of(np.zeros(6, np.float32))
    assert (cells // LEVELS).tolist() == [0, 1, 1, 1, 2, 2]
    assert LEAST_ENDS == (1, 4)
    assert cells_of(np.array([-99.0])).tolist() == [LEVELS - 1]


def test_trees_keep_what_is_wanted() -> None:
    falling = TokenTree.from_arrays([1, 2, 3], [-1, 0, 0], [-0.1, -0.3, -0.9], root=9)
    mixed = TokenTree.from_arrays([1, 2, 3], [-1, -1, 1], [-0.9, -0.1, -0.3], root=9)
    least = least_of([4, 2, 0])
    for tree, kept in ((falling, [9, 1, 2]), (mixed, [9, 2, 3])):
        assert above(tree, [least]).tokens.tolist() == [kept]
        assert above(tree, [None]) is tree
        assert above(tree, [least_of([LEVELS] * PARTS)]) is tree
    both = above(TokenTree.stack([falling, mixed]), [None, least_of([0] * PARTS)])
    assert both.sizes == (4, 1)


def averages_of(random: np.random.Generator, batch: int) -> list[Average | None]:
    """Some of which know of guesses, others take no part."""
    made: list[Average | None] = []
    for _ in range(batch):
        average = Average(0.9)
        there = random.exponential(0.3, average.values.shape[1]) * (random.random(average.values.shape[1]) < 0.7)
        average.values[1] = there
        average.values[0] = there * random.random(len(there))
        made.append(average if random.random() < 0.8 else None)
    return made


def test_the_compiled_reach_is_the_plain_one() -> None:
    if library() is None:
        pytest.skip("draftree was built without a C compiler")
    random, chosen = np.random.default_rng(4), set()
    for _ in range(400):
        batch = int(random.integers(1, 6))
        averages = averages_of(random, batch)
        seconds = 1 + np.cumsum(random.exponential(float(random.choice([0.001, 0.02, 0.2])), batch * (AHEAD + 1)))
        for packed in (True, False):
            ours, plain = (of(averages, seconds, 0.1, packed=packed) for of in (reach, plain_reach))
            assert ours.levels == plain.levels
            assert ours.gains == pytest.approx(plain.gains)
            assert ours.guesses == pytest.approx(plain.guesses)
            assert ours.seconds == pytest.approx(plain.seconds)
            chosen.update(ours.levels)
    assert len(chosen) > 50
    many: list[Average | None] = [Average(0.9)] * 200  # too many for the compiled form
    assert len(reach(many, np.linspace(1, 2, 5000), 0.0, packed=True).levels) == 200


def test_a_reach_is_the_best_of_all() -> None:
    """One request whose guesses are worth less from part to part and from bin to bin; rows cost the same everywhere."""
    random = np.random.default_rng(5)
    some = set()
    for _ in range(20):
        average = Average(0.9)
        rates = np.sort(random.random(PARTS * LEVELS))[::-1]
        average.values[1] = random.exponential(0.05, PARTS * LEVELS)
        average.values[0] = rates * average.values[1]
        row = float(random.choice([0.1, 0.3, 0.6]))
        seconds = 1 + row * np.arange(AHEAD + 1.0)
        found = reach([average], seconds, 0.2, packed=True)
        right, there = average.values[:2].reshape(2, PARTS, LEVELS).cumsum(2)

        def pace(
            levels: tuple[int, ...], right: np.ndarray = right, there: np.ndarray = there, row: float = row
        ) -> float:
            gain, rows = (
                sum(float(of[part, level - 1]) for part, level in enumerate(levels) if level) for of in (right, there)
            )
            return (1 + gain) / (1.2 + row * rows)

        best = max(pace(levels) for levels in itertools.product(range(LEVELS + 1), repeat=PARTS))
        assert pace(found.levels[0]) == pytest.approx(best, rel=1e-3)  # cells with next to no guesses come along
        assert found.gains[0] / found.seconds == pytest.approx(best, rel=1e-3)
        some.add(found.levels[0])
    assert len(some) > 10


def test_a_cell_that_was_seldom_seen_does_not_hide_those_behind_it() -> None:
    average = Average(0.9)
    average.values[:2] = 0.0
    average.values[:2, 0] = 0.3, 0.4
    average.values[:2, 1] = 0.0, 0.01  # once, and it was wrong
    average.values[:2, 2] = 0.4, 0.5
    found = reach([average], 1 + 0.2 * np.arange(AHEAD + 1.0), 0.0, packed=True)
    assert found.levels[0][0] >= 3


def test_rows_of_large_trees_cost_what_they_cost_there() -> None:
    """The first five rows are free and others dear: that most trees are small does not make large ones cheap."""
    average = Average(0.9)
    average.values[:2] = 0.0
    average.values[:2, 0] = 0.2, 0.3
    average.values[:2, 2 * LEVELS] = 0.5, 1.0  # ten in one tree of ten
    seconds = 1 + 0.6 * np.maximum(np.arange(AHEAD + 1.0) - 4, 0)
    found = reach([average], seconds, 0.0, packed=True)
    assert found.levels[0][0] >= 1
    assert found.levels[0][2] == 0
