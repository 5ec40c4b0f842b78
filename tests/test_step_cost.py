"""The curve of what steps cost, from memory and disk: damaged, outgrown and nonsensical ones are measured again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from zoo import build

from draftree.host import cost as cost_module
from draftree.host import open_host
from draftree.host.cost import StepCost, cached_cost

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

    def measure(host: object, context: int) -> StepCost:
        measured.append(host)
        return StepCost((1, 2), (1.0, 2.0 + len(measured)))

    monkeypatch.setattr(cost_module, "measure_cost", measure)
    host = open_host(build("llama"))
    monkeypatch.setattr(host, "costs", {})
    assert cached_cost(host).seconds.tolist() == [1.0, 3.0]
    assert cached_cost(host) is cached_cost(host)
    host.costs.clear()
    assert cached_cost(host).seconds.tolist() == [1.0, 3.0]  # from disk
    assert len(measured) == 1
    (path,) = tmp_path.iterdir()
    host.costs.clear()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(damage.encode("latin-1"))
    assert cached_cost(host).seconds.tolist() == [1.0, 4.0]
    assert json.loads(path.read_text()) == {"rows": [1.0, 2.0], "seconds": [1.0, 4.0]}
    monkeypatch.setattr(host, "costs", {})


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DRAFTREE_CACHE", str(blocked))
    monkeypatch.setattr(cost_module, "measure_cost", lambda host, context: FLAT)
    host = open_host(build("llama"))
    monkeypatch.setattr(host, "costs", {})
    assert cached_cost(host) is FLAT


def test_a_curve_from_disk_that_no_longer_holds_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curve measured beside a busy process has another shape: few steps tell, and only where steps are quick."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    truth = StepCost((1, 16, 64), (0.001, 0.002, 0.008))
    flat = StepCost((1, 16, 64), (0.001, 0.001, 0.002))
    slow = StepCost((1, 16, 64), (1.0, 1.0, 2.0))
    measured = []

    def measure(host: object, seconds: float = 0.0, counts: object = None, context: int = 128) -> StepCost:
        measured.append(counts)
        return truth

    host = open_host(build("llama"))
    for held, calls in ((truth, 1), (flat, 2), (slow, 0)):
        monkeypatch.setattr(host, "costs", {})
        path = tmp_path / f"{cost_module._key(host)}.json"
        path.write_text(json.dumps({"rows": held.rows.tolist(), "seconds": held.seconds.tolist()}))
        measured.clear()
        monkeypatch.setattr(cost_module, "measure_cost", measure)
        found = cached_cost(host)
        assert len(measured) == calls
        assert found.seconds.tolist() == (slow if held is slow else truth).seconds.tolist()
    monkeypatch.setattr(host, "costs", {})


def test_a_curve_that_makes_no_sense_is_measured_again_and_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait for a busy process: two rows took a thousand times one. All guesses would be dear for good."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    nonsense, truth = StepCost((1, 2, 16), (0.0003, 0.3, 0.4)), StepCost((1, 2, 16), (0.0003, 0.0004, 0.001))
    host = open_host(build("llama"))
    path = tmp_path / f"{cost_module._key(host)}.json"
    for found, expected in (([truth], truth), ([nonsense, truth], truth), ([nonsense] * 3, None)):
        path.write_text(json.dumps({"rows": nonsense.rows.tolist(), "seconds": nonsense.seconds.tolist()}))
        left = list(found)
        monkeypatch.setattr(cost_module, "measure_cost", lambda *_, left=left, **__: left.pop(0))
        monkeypatch.setattr(host, "costs", {})
        cost = cached_cost(host)
        assert not left
        if expected is not None:
            assert cost.seconds.tolist() == expected.seconds.tolist()
            assert json.loads(path.read_text())["seconds"] == expected.seconds.tolist()
        else:  # no more than a pass for each row
            assert cost.seconds.tolist() == pytest.approx([0.0003, 0.0006, 0.0048])
            assert json.loads(path.read_text())["seconds"] == nonsense.seconds.tolist()  # as it was
    monkeypatch.setattr(host, "costs", {})
