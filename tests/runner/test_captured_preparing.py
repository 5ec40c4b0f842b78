"""Passes that record, which takes long on a GPU: a shape first runs without it, and neither pass counts as a step.

`CostlyTape` takes the place of a CUDA graph; see `tape`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from generate_driver import drafters, prompts
from runner_driver import Run, Tree, difference, one_thread  # noqa: F401
from tape import Tape, passes, record_on, tape
from timed_shape import Timed
from zoo import build

from draftree.engine import Engine, SamplingParams, generate
from draftree.runner import CudaGraphRunner, EagerRunner, inspect_model
from draftree.runner.base import note_preparation, preparations
from draftree.runner.cuda_graphs import runner as graph_runner
from draftree.runner.step_cost import measure_cost
from draftree.shaping import DynamicTree

CLOSE = 2e-5


class CostlyTape(Tape):
    """Takes as long to record as a GPU does."""

    costly = True


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Return a clock that advances 0.1 ms a reading and 0.1 s for each pass that prepares a recording."""
    now = [0.0]

    def prepare() -> None:
        now[0] += 0.1
        note_preparation()

    def clock() -> float:
        now[0] += 1e-4
        return now[0]

    record_on(monkeypatch, CostlyTape)
    monkeypatch.setattr(graph_runner, "note_preparation", prepare)
    return clock


def test_a_shape_is_recorded_the_second_time(costly: Callable[[], float]) -> None:
    target = inspect_model(build("llama"))
    captured = CudaGraphRunner(target)
    runs = [Run(runner, (40, 19)).prefill() for runner in (EagerRunner(target), captured)]
    trees, prepared = [Tree.random(6, 1), Tree.random(5, 2)], []
    for _ in range(4):
        before = preparations()
        expected, found = (run.step(trees) for run in runs)
        prepared.append(preparations() - before)
        assert difference(found.logits[0], expected.logits[0]) < CLOSE
        assert difference(found.logits[1, :5], expected.logits[1, :5]) < CLOSE
    assert prepared == [1, 1, 0, 0]
    assert passes(captured).recorded == 1
    assert tape(captured).replayed == 3


def test_step_costs_leave_recording_out(costly: Callable[[], float]) -> None:
    cost = measure_cost(CudaGraphRunner(inspect_model(build("llama"))), clock=costly)
    assert cost.rows[-1] == 128
    assert cost.seconds.max() < 0.001


@pytest.mark.parametrize("kind", ["lookahead", "draft-model"])
def test_sizing_leaves_recording_out(kind: str, costly: Callable[[], float]) -> None:
    row, model = prompts((12,))[0], copy.deepcopy(build("llama"))  # with a runner of its own
    text = generate(model, torch.tensor([row]), max_new_tokens=60, eos_token_id=[]).sequences[0, len(row) :].tolist()
    shape = Timed(DynamicTree())
    engine = Engine(
        model, runner="cuda_graphs", drafter=drafters({tuple(row): text})[kind](), shape=shape, slots=1, clock=costly
    )
    request = engine.add(row, SamplingParams(max_new_tokens=60, eos_token_ids=()))
    engine.run()
    assert request.tokens == text
    seen = [seconds for seconds, _ in shape.steps]
    assert max(seconds for seconds in seen if seconds is not None) < 0.1
    assert seen.count(None) > 2


def test_kernels_that_do_not_run_are_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton needs a C compiler at its first use, for one."""
    parts = EagerRunner(inspect_model(build("llama")))._layers[0].parts
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(graph_runner, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not graph_runner.has_kernels(parts, torch.float64, cuda)
    assert not graph_runner.has_kernels(parts, torch.float32, torch.device("cpu"))
    assert not caplog.records
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    modules: dict[str, Any] = {name: ModuleType(name) for name in ("kernels", "products")}
    for name, module in modules.items():
        module.check = lambda *given: None
        monkeypatch.setitem(sys.modules, f"draftree.runner.cuda_graphs.{name}", module)
    assert graph_runner.has_kernels(parts, torch.bfloat16, cuda)

    def fails(*given: Any) -> None:
        raise RuntimeError("Failed to find C compiler.")

    modules["products"].check = fails
    assert not graph_runner.has_kernels(parts, torch.bfloat16, cuda)
    assert "do not run here, so that steps take longer: Failed to find C compiler." in caplog.text
    assert graph_runner.has_kernels(parts, torch.float32, cuda)  # torch makes these products
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not graph_runner.has_kernels(parts, torch.float32, cuda)
