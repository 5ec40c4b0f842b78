"""The curve of what steps cost, from memory and disk: damaged, outgrown and nonsensical ones are measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftree.shaping.gathered import StepTime
from zoo import build

from draftree.runner import open_runner
from draftree.runner import step_cost as cost_module
from draftree.runner.step_cost import StepCost, cached_cost
from draftree.shaping.planner import Planner

FLAT = StepCost((1, 64), (1.0, 1.001))


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        '{"rows": [1], "seconds": [1]}',
        '{"rows": [1, 2], "seconds": [NaN, 1]}',
        "\x00\xff",
        "missing",
    ],
)
def test_the_curve_is_kept_on_disk(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    measured = []

    def measure(runner: object, context: int) -> StepCost:
        measured.append(runner)
        return StepCost((1, 2), (1.0, 2.0 + len(measured)))

    monkeypatch.setattr(cost_module, "measure_cost", measure)
    runner = open_runner(build("llama"))
    monkeypatch.setattr(runner, "costs", {})
    assert cached_cost(runner).seconds.tolist() == [1.0, 3.0]
    assert cached_cost(runner) is cached_cost(runner)
    runner.costs.clear()
    assert cached_cost(runner).seconds.tolist() == [1.0, 3.0]  # from disk
    assert len(measured) == 1
    (path,) = tmp_path.iterdir()
    runner.costs.clear()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(damage.encode("latin-1"))
    assert cached_cost(runner).seconds.tolist() == [1.0, 4.0]
    assert json.loads(path.read_text()) == {"rows": [1.0, 2.0], "seconds": [1.0, 4.0]}
    monkeypatch.setattr(runner, "costs", {})


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DRAFTREE_CACHE", str(blocked))
    monkeypatch.setattr(cost_module, "measure_cost", lambda runner, context: FLAT)
    runner = open_runner(build("llama"))
    monkeypatch.setattr(runner, "costs", {})
    assert cached_cost(runner) is FLAT


def test_a_curve_from_disk_that_no_longer_holds_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curve measured beside a busy process has another shape: few steps tell, and only where steps are quick."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    truth = StepCost((1, 16, 64), (0.001, 0.002, 0.008))
    flat = StepCost((1, 16, 64), (0.001, 0.001, 0.002))
    slow = StepCost((1, 16, 64), (1.0, 1.0, 2.0))
    measured = []

    def measure(runner: object, seconds: float = 0.0, counts: object = None, context: int = 128) -> StepCost:
        measured.append(counts)
        return truth

    runner = open_runner(build("llama"))
    for held, calls in ((truth, 1), (flat, 2), (slow, 0)):
        monkeypatch.setattr(runner, "costs", {})
        path = tmp_path / f"{cost_module._key(runner)}.json"
        path.write_text(json.dumps({"rows": held.rows.tolist(), "seconds": held.seconds.tolist()}))
        measured.clear()
        monkeypatch.setattr(cost_module, "measure_cost", measure)
        found = cached_cost(runner)
        assert len(measured) == calls
        assert found.seconds.tolist() == (slow if held is slow else truth).seconds.tolist()
    monkeypatch.setattr(runner, "costs", {})


def test_a_curve_that_makes_no_sense_is_measured_again_and_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait for a busy process: two rows took a thousand times one. All guesses would be dear for good."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    nonsense, truth = StepCost((1, 2, 16), (0.0003, 0.3, 0.4)), StepCost((1, 2, 16), (0.0003, 0.0004, 0.001))
    runner = open_runner(build("llama"))
    path = tmp_path / f"{cost_module._key(runner)}.json"
    for found, expected in (([truth], truth), ([nonsense, truth], truth), ([nonsense] * 3, None)):
        path.write_text(json.dumps({"rows": nonsense.rows.tolist(), "seconds": nonsense.seconds.tolist()}))
        left = list(found)
        monkeypatch.setattr(cost_module, "measure_cost", lambda *_, left=left, **__: left.pop(0))
        monkeypatch.setattr(runner, "costs", {})
        cost = cached_cost(runner)
        assert not left
        if expected is not None:
            assert cost.seconds.tolist() == expected.seconds.tolist()
            assert json.loads(path.read_text())["seconds"] == expected.seconds.tolist()
        else:  # no more than a pass for each row
            assert cost.seconds.tolist() == pytest.approx([0.0003, 0.0006, 0.0048])
            assert json.loads(path.read_text())["seconds"] == nonsense.seconds.tolist()  # as it was
    monkeypatch.setattr(runner, "costs", {})


def test_a_curve_is_measured_warm_and_within_one_mood_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step behind one of many more rows finds its caches cold; and the machine is twice as quick in some moments."""
    runner = open_runner(build("llama"))
    now, before, run = 0.0, 1, runner.run

    def timed(plan: Any, *args: Any, **options: Any) -> Any:
        nonlocal now, before
        rows = plan.tokens.shape[1]
        cold = 1.5 if rows * 3 < before else 1.0
        quick = 0.5 if int(now / 0.03) % 3 == 0 else 1.0
        now += 1e-4 * (1 + 0.1 * rows) * cold * quick
        before = rows
        return run(plan, *args, **options)

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now

    monkeypatch.setattr(runner, "run", timed)
    monkeypatch.setattr(cost_module, "time", Clock)
    cost = cost_module.measure_cost(runner)
    np.testing.assert_allclose(cost.seconds / cost.seconds[0], (1 + 0.1 * cost.rows) / 1.1, rtol=0.03)


def test_the_first_steps_tell_how_quick_the_machine_is_now() -> None:
    cost = StepCost((1, 2, 64), (1.0, 1.1, 7.3))
    cost.observe(2, 2.2, 8)
    assert cost.of(2) == pytest.approx(2.2)
    assert cost.of(64) > 7.3 * 1.6
    cost.observe(2, 1.1, 1)  # one step is not believed at once any more
    assert cost.of(2) > 2.0


def test_plain_steps_have_a_speed_of_their_own_beside_steps_with_guesses() -> None:
    """A pass behind a drafter's work is slower by a ninth: that must not be taken for the machine's speed."""
    planner = Planner(64, None)
    planner.bind(StepCost((1, 2, 64), (1.0, 1.1, 7.3)), None, None, packed=True)
    for _ in range(20):
        planner.cruised(1, [StepTime(3, 1.2, 1.3)] * 8)
        planner.cruised(1, [StepTime(3, 1.2, 1.3)] * 8)
        planner.rested(1, [StepTime(1, 0.9, 0.95)] * 8)
        planner.rested(1, [StepTime(1, 0.9, 0.95)] * 8)
    assert planner.undisturbed(1) == pytest.approx(0.9, rel=0.02)
    assert planner.cost(1).of(3) == pytest.approx(1.2, rel=0.02)
    assert planner.beside == pytest.approx(0.05)
    assert planner.aside_between == pytest.approx(0.05)
    for _ in range(50):  # a long rest, on a machine that has become slower
        planner.rested(1, [StepTime(1, 1.8, 1.9)] * 8)
    assert planner.cost(1).of(3) == pytest.approx(2.4, rel=0.1)


def test_steps_of_few_and_many_rows_are_not_taken_for_such_of_their_average() -> None:
    curve = StepCost((1, 4, 16), (1.0, 1.0, 7.0))
    planner = Planner(64, None)
    planner.bind(curve, None, None, packed=True)
    for _ in range(30):
        planner.cruised(1, [StepTime(1, 1.0, 1.0), StepTime(16, 7.0, 7.0)] * 4)
    np.testing.assert_allclose(curve.seconds, [1.0, 1.0, 7.0], rtol=1e-6)
