"""The curve of what steps cost: measured in a dozen steps, and kept true by the steps that follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from zoo import build

from draftree.runner import open_runner
from draftree.runner.step_cost import DEAR, StepCost, cached_cost, measure_cost


def test_between_and_beyond_known_points() -> None:
    cost = StepCost((1, 4, 8), (1.0, 4.0, 6.0))
    assert cost.of([1, 2, 4, 6, 8, 12]).tolist() == pytest.approx([1, 2, 4, 5, 6, 8])
    assert cost.table[[1, 2, 12]].tolist() == pytest.approx([1, 2, 8])
    assert cost.look_up(np.array([1, 12])).tolist() == pytest.approx([1, 8])
    assert cost.look_up(np.array([1, 4000])).tolist() == pytest.approx([1, 2002])  # a table does not hold as many


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((1,), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((1, 2), (1.0, np.nan)), ((1, 2), (0, 1))],
)
def test_what_is_no_curve(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="step-cost curve needs"):
        StepCost(rows, seconds)


def test_more_rows_never_cost_less() -> None:
    cost = StepCost((1, 2, 3, 4), (1.0, 3.0, 2.0, 4.0))
    found = cost.of([1, 2, 3, 4])
    assert (np.diff(found) >= 0).all()
    assert found[0] == pytest.approx(1.0)
    assert 2.0 < found[1] < 3.0


def test_a_slow_measurement_is_outweighed_by_larger_sizes() -> None:
    """Two slow steps of 3 rows count for less than a hundred of 7 rows: 3 rows are never thought slower."""
    cost = StepCost((1, 4, 8), (8.0, 10.0, 11.5))
    for _ in range(2):
        cost.observe(3, 14.0)
    for _ in range(100):
        cost.observe(7, 11.2)
    assert cost.of(7) == pytest.approx(11.2, rel=0.02)
    assert cost.of(3) <= cost.of(7)


def test_a_size_that_is_met_often_is_believed() -> None:
    """A jump between two sizes of a kernel stays where it is."""
    cost = StepCost((1, 8, 16), (1.0, 1.2, 2.0))
    for _ in range(60):
        cost.observe(8, 1.2)
        cost.observe(9, 1.9)
        cost.observe(16, 2.0)
    assert cost.of([8, 9, 16]).tolist() == pytest.approx([1.2, 1.9, 2.0], rel=0.05)


def test_real_steps_move_the_curve() -> None:
    """A machine that is twice as slow moves all of it; a row count with a time of its own moves its own point."""
    cost = StepCost((1, 4, 8), (1.0, 1.2, 1.6))
    for _ in range(60):
        cost.observe(1, 2.0)
    assert cost.of([1, 4, 8]).tolist() == pytest.approx([2.0, 2.4, 3.2], rel=0.05)
    for _ in range(60):
        cost.observe(1, 2.0)
        cost.observe(6, 4.0)
    assert cost.of(6) == pytest.approx(4.0, rel=0.1)
    assert cost.of(1) == pytest.approx(2.0, rel=0.1)


def test_a_stall_moves_it_little() -> None:
    cost = StepCost((1, 8), (1.0, 2.0))
    for _ in range(50):
        cost.observe(1, 1.0)
    cost.observe(1, 500.0)
    assert cost.of(1) < 1.15


def test_batches_have_curves_of_their_own() -> None:
    cost = StepCost((1, 8), (1.0, 2.0))
    batch = cost.for_batch()
    batch.observe(4, 9.0)
    assert batch.of(4) > 4
    assert cost.of(4) == pytest.approx(1 + 3 / 7)


class Machine:
    """A runner whose passes take what `seconds` says of their rows, by a clock of its own."""

    def __init__(self, seconds: Any, max_positions: int | None = None) -> None:
        self.seconds, self.now = seconds, 0.0
        self.passes: list[int] = []
        self.target = SimpleNamespace(
            device=torch.device("cpu"), max_positions=max_positions, encoder_decoder=False, recurrence=None
        )
        self.lock = self.guard()

    def guard(self) -> Any:
        return torch.no_grad()

    def new_cache(self, slots: int, capacity: int) -> None:
        return None

    def run(self, plan: Any, cache: Any, encoder: Any = None) -> Any:
        rows = plan.tokens.shape[1]
        self.passes.append(rows)
        self.now += self.seconds(rows)
        return SimpleNamespace(logits=torch.zeros(1, rows, 1))

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "seconds",
    [
        lambda rows: 0.05,  # a GPU: rows are free
        lambda rows: 0.05 * (1.0 + 0.01 * rows if rows < 8 else 1.5 + 0.03 * rows),  # a kernel for fewer than 8
        lambda rows: 0.05 * rows,  # every row costs a step
    ],
)
def test_a_dozen_steps_measure_it(seconds: Any) -> None:
    machine = Machine(seconds)
    cost = measure_cost(machine, clock=machine.clock)  # type: ignore[arg-type]
    assert machine.now <= 17 * seconds(1)
    measured = sorted(set(machine.passes))
    assert cost.of(measured).tolist() == pytest.approx([seconds(n) for n in measured])
    assert measured[-1] == 128 or seconds(measured[-1]) > DEAR * seconds(1)


@pytest.mark.parametrize("held_up", [2, 3, 4, 5])
def test_one_pass_that_is_held_up_does_not_end_the_curve(held_up: int) -> None:
    machine = Machine(lambda rows: 0.01 * (1 + rows / 100) * (5 if len(machine.passes) == held_up else 1))
    cost = measure_cost(machine, clock=machine.clock)  # type: ignore[arg-type]
    assert cost.rows[-1] == 128
    assert cost.of([1, 4, 8, 16, 32]).tolist() == pytest.approx([0.01 * (1 + n / 100) for n in (1, 4, 8, 16, 32)])


def test_slow_machines_are_not_kept_waiting() -> None:
    machine = Machine(lambda rows: 3.0 + rows)
    measure_cost(machine, clock=machine.clock)  # type: ignore[arg-type]
    assert len(machine.passes) <= 3


@pytest.mark.parametrize("positions", [1, 3, 20])
def test_short_contexts_are_measured_too(positions: int) -> None:
    machine = Machine(lambda rows: 0.01, positions)
    cost = measure_cost(machine, clock=machine.clock)  # type: ignore[arg-type]
    assert max(machine.passes) <= positions
    assert cost.of(64) > 0


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_real_models_are_measured_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_runner(build(name))
    monkeypatch.setattr(runner, "costs", {})
    cost = cached_cost(runner)
    assert (cost.seconds > 0).all()
    assert cached_cost(runner) is cost
