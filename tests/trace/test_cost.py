"""What recording costs: no tensor operation and a few lines of Python a step, whatever its trees; some microseconds."""

from __future__ import annotations

import gc
import statistics as middle
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from trace_driver import record

import draftree
from draftree.engine import Engine, Recorder, SamplingParams
from draftree.engine.recorder import Track
from draftree.models import encode_prompt
from draftree.shaping import Fixed

# What Tensor.numpy() asks for on its way to a view of the same memory.
READING = {
    f"aten.{name}" for name in ("detach.default", "resolve_conj.default", "resolve_neg.default", "to.dtype_layout")
}


class Operations(TorchDispatchMode):
    """Notes tensor operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_recorded_step_does_no_tensor_operation_and_no_work_by_node(monkeypatch):
    lines: list[int] = []
    calls = 0

    def counted(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % 4 < 2:  # two methods a step
                with Operations() as mode:
                    method(*arguments)
                assert mode.names <= READING, "nothing is computed"
            else:
                lines.append(lines_run(lambda: method(*arguments)))

        return call

    for name in ("drafted", "step"):
        monkeypatch.setattr(Track, name, counted(getattr(Track, name)))
    most = set()
    for node_budget in (2, 30):
        for case in ("trie-pruned", "merged-pruned"):
            record(case, node_budget=node_budget)
        assert len(lines) > 10
        most.add(max(lines))
        lines.clear()
    assert len(most) == 1, "as many lines of Python for large trees as for small ones"
    assert most.pop() < 60, "for a batch of three"


def lines_run(call: Callable[[], None]) -> int:
    """Lines of Python that `call` runs, in all functions."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
def test_little_of_a_recorded_step_stays_alive(demo):
    """The collector looks at it again and again: a hundred thousand objects are a tenth of a second."""
    kept: dict[bool, list[int]] = {False: [], True: []}
    for recorder in (None, Recorder(), None, Recorder(), None, Recorder()):  # caches fill and empty beside it
        engine = engine_of(demo, recorder)
        for _ in range(4):
            engine.step()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(24):
            engine.step()
        assert engine.busy
        gc.collect()
        kept[recorder is not None].append(len(gc.get_objects()) - before)
    without, with_one = max(min(kept[False]), 0), min(kept[True])  # what others let go is no room for it
    assert with_one - without < 24 * 16, "objects that the collector looks at, of 24 steps"


NEW = 96  # tokens of an answer


def engine_of(demo: Any, recorder: Recorder | None = None) -> Engine:
    """An engine in the middle of an answer, the same steps every time: drafts of a trie that has seen only this."""
    drafter = draftree.Lookahead()
    engine = Engine(demo.model, drafter=drafter, shape=Fixed(16), slots=1, recorder=recorder)
    ids = encode_prompt(demo.tokenizer, "Describe the restaurant: name[Aromi], food[French], area[riverside]")
    engine.add(ids, SamplingParams(max_new_tokens=NEW))
    engine.step()  # the prompt
    return engine


@pytest.mark.slow
@pytest.mark.alone
def test_recording_costs_a_few_microseconds_a_step(demo, monkeypatch):
    """CPU time within the recorder; whole steps with and without one differ by more from moment to moment."""
    taken: list[float] = []

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            begin = time.thread_time()
            method(*arguments)
            taken.append(time.thread_time() - begin)

        return call

    for name in ("drafted", "step"):
        monkeypatch.setattr(Track, name, timed(getattr(Track, name)))
    for _ in range(20):
        engine = engine_of(demo, Recorder())
        while engine.busy:
            engine.step()
    a_step = [drafted + step for drafted, step in zip(taken[::2], taken[1::2], strict=True)]
    print(f"recording takes {1e6 * middle.median(a_step):.2f} microseconds of a step, in {len(a_step)} steps")
    assert len(a_step) > 200
    assert middle.median(a_step) < 15e-6
