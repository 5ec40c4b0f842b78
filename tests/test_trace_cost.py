"""What recording costs: no tensor operation and a few lines of Python a step, whatever its trees; some microseconds."""

from __future__ import annotations

import statistics as middle
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_trace import record
from torch.utils._python_dispatch import TorchDispatchMode

import draftree
from draftree.bench.models import encode_prompt
from draftree.engine import Engine, Recorder, Rules
from draftree.engine.recorder import Track
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
    for case in ("trie-pruned", "merged-pruned"):
        record(case)
    assert len(lines) > 10
    assert max(lines) < 20, "lines of Python, for a batch of three and whatever its trees"


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


WAYS = ("off", "on", "off again")


def seconds_of_steps(demo: Any, rounds: int) -> dict[str, float]:
    """CPU seconds of a step, undisturbed: each step's fastest of all rounds, and the mean of those.

    Ways are interleaved answer by answer in one process; whatever else runs on the machine only ever adds time.
    """
    ids = encode_prompt(demo.tokenizer, "Describe the restaurant: name[Aromi], food[French], area[riverside]")
    drafter = draftree.Lookahead()
    spent: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for place in range(len(WAYS)):
            way = WAYS[(number + place) % len(WAYS)]
            recorder = Recorder() if way == "on" else None
            engine = Engine(
                demo.model, drafter=drafter, shape=Fixed(16), slots=1, recorder=recorder, reject_drafts=True
            )
            engine.add(ids, Rules(max_new_tokens=64))
            engine.step()  # the prompt
            steps = []
            while engine.busy:
                begin = time.thread_time()
                engine.step()
                steps.append(time.thread_time() - begin)
            spent[way].append(steps)
    return {way: middle.mean(min(times) for times in zip(*runs, strict=True)) for way, runs in spent.items()}


@pytest.mark.slow
def test_recording_costs_some_microseconds_a_step(demo):
    """A hundredth of a step of a millisecond or two; the embedded model's, of half a millisecond, is the shortest."""
    added = []
    for _ in range(5):
        spent = {way: 1e6 * seconds for way, seconds in seconds_of_steps(demo, 40).items()}
        plain = (spent["off"] + spent["off again"]) / 2
        added.append(spent["on"] - plain)
        said = ", ".join(f"{way} {microseconds:.1f}" for way, microseconds in spent.items())
        print(f"microseconds of a step: {said}; on / off {spent['on'] / plain:.4f}")
    print(f"added, middle of {len(added)}: {middle.median(added):.1f} microseconds")
    assert middle.median(added) < 20
