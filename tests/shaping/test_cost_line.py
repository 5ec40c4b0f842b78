"""ProPD's cost line: the closed form is the weighted fit, and it follows a machine that changes."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from draftree.runner.step_cost import StepCost
from draftree.shaping.cost_line import CostLine
from draftree.shaping.planner import choose


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_form_is_the_weighted_fit(seed: int) -> None:
    rng = random.Random(seed)
    line = CostLine(alpha=0.3, fading=0.05)
    averages: dict[int, float] = {}
    last: dict[int, int] = {}
    for step in range(1, 60):
        rows = rng.choice([1, 4, 9, 16, 33])
        seconds = (2.0 + 0.1 * rows) * rng.uniform(0.9, 1.1)
        before = averages.get(rows, float(line.of(rows)) if len(averages) > 1 else seconds)
        line.observe(rows, seconds)
        averages[rows] = 0.7 * before + 0.3 * seconds
        last[rows] = step
        if len(averages) < 2:
            continue
        weights = [math.exp(-0.05 * (step - last[n])) for n in averages]
        # numpy weighs residuals, not their squares
        b1, b0 = np.polyfit(list(averages), list(averages.values()), 1, w=np.sqrt(weights))
        if b1 > 0:
            assert line.line == pytest.approx((b0, b1), rel=1e-6)
            assert line.of([2, 50]) == pytest.approx(b0 + b1 * np.array([2, 50]))
    assert line.rows.tolist() == sorted(averages)
    assert line.seconds == pytest.approx(line.of(line.rows))


def test_it_follows_a_change_of_speed() -> None:
    """32 steps after all steps have become twice as slow, the line is within 5 % of them at the sizes in use."""
    line = CostLine()
    sizes = (8, 16)
    for step in range(100):
        line.observe(sizes[step % 2], 1.0 + 0.05 * sizes[step % 2])
    assert line.of(12) == pytest.approx(1.6)
    for step in range(32):
        line.observe(sizes[step % 2], 2 * (1.0 + 0.05 * sizes[step % 2]))
    assert line.of(12) == pytest.approx(3.2, rel=0.05)
    assert line.of(1) == pytest.approx(2.1, rel=0.1)


def test_sizes_not_seen_for_long_weigh_less() -> None:
    line = CostLine(fading=0.05)
    for rows, seconds in ((1, 1.0), (64, 9.0), (8, 1.2), (16, 1.4)):
        line.observe(rows, seconds)
    early = abs(line.of(16) - 1.4)
    for _ in range(200):
        line.observe(8, 1.2)
        line.observe(16, 1.4)
    assert abs(line.of(16) - 1.4) < 0.01 * early
    for _ in range(20_000):  # all others' weights underflow, and the line goes through the one that is left
        line.observe(8, 1.5)
    assert line.of(8) == pytest.approx(1.5)
    assert 0 <= line.line[1] < 0.03


def test_seeded_or_from_nothing() -> None:
    curve = StepCost((1, 8, 64), (1.0, 1.7, 7.3))  # on a line
    line = CostLine(curve)
    assert line.of([1, 8, 64, 100]) == pytest.approx(curve.of([1, 8, 64, 100]))
    assert line.table[3:6] == pytest.approx(curve.of([3, 4, 5]))
    line.observe(8, 3.0)
    assert line.table[8] > 1.75  # the table does not stay behind
    nothing = CostLine()
    assert nothing.table[1:4].tolist() == [1.0, 1.0, 1.0]
    nothing.observe(4, 0.02)
    assert nothing.of([1, 64]).tolist() == [0.02, 0.02]
    nothing.observe(8, 0.03)
    assert nothing.of([4, 8, 12]) == pytest.approx([0.02, 0.03, 0.04])


def test_it_never_falls_nor_reaches_zero() -> None:
    line = CostLine()
    line.observe(4, 2.0)
    line.observe(8, 1.5)
    assert line.line[1] == 0.0
    steep = CostLine()
    steep.observe(60, 1.0)
    steep.observe(64, 1.9)
    assert (steep.of(range(1, 64)) > 0).all()


def test_one_stall_moves_it_little() -> None:
    line = CostLine(StepCost((1, 64), (1.0, 7.3)))
    for _ in range(2):  # of a size that is new, and of one that is not
        before = float(line.of(8))
        line.observe(8, 4000.0)
        assert line.of(8) < 1.2 * before
    with pytest.raises(ValueError, match="finite number of seconds"):
        line.observe(8, math.nan)


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": 1.5}, {"fading": -0.1}, {"fading": math.nan}])
def test_what_is_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        CostLine(**options)


def test_trees_are_sized_by_it() -> None:
    """It stands wherever a measured curve does."""
    chances = [[0.9, 0.5, 0.2, 0.01]]
    cheap, dear = CostLine(StepCost((1, 64), (1.0, 1.06))), CostLine(StepCost((1, 64), (1.0, 64.0)))
    assert choose(chances, cheap.table[1:].tolist(), packed=True) == [4]
    assert choose(chances, dear.table[1:].tolist(), packed=True) == [0]


def test_a_step_costs_microseconds() -> None:
    line = CostLine(StepCost(range(1, 17), np.linspace(1.0, 2.0, 16)))
    spent = []
    for _ in range(20):
        begin = time.thread_time()
        for _ in range(50):
            line.observe(8, 1.4)
            line.of(65)
        spent.append((time.thread_time() - begin) / 50)
    assert min(spent) < 200e-6  # 30 us where it was made
