"""A capture for tests on a CPU: as a CUDA graph, it repeats operations and does not run Python again.

Python values that a function reads while it is recorded (lengths, lists, new tensors) stay the same in replays. Reading
from the device (`item`, `nonzero`, a shape that depends on numbers) fails, as it does in a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import draftree.runner
from draftree.runner import CudaGraphRunner, Runner
from draftree.runner.cuda_graphs import runner as graph_runner
from draftree.runner.cuda_graphs.frames import Capture

aten = torch.ops.aten
ASKING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten._unique2, aten.equal}
# A number that becomes a tensor is copied from the CPU's memory, which a capture does not allow.
COPYING = {aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, aten.scalar_tensor.default}


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors of an operation's result."""
    leaves = [result] if isinstance(result, Tensor) else tree_flatten(result)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Noting(TorchDispatchMode):
    """Notes operations with the numbers of the tensors they make."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, list[Any], Any, list[int]]] = []  # function, arguments, their form, tensors made
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []  # or an id could come back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in ASKING:
            raise RuntimeError(f"{func} waits for the device")
        if func in COPYING:
            raise RuntimeError(f"{func} copies a number to the device")
        numbered = tree_map_only(Tensor, self._number, (args, kwargs))
        out = func(*args, **kwargs)
        made = []
        for tensor in tensors_of(out):
            self.alive.append(tensor)
            made.append(self.numbers.setdefault(id(tensor), len(self.numbers)))
        self.steps.append((func, *tree_flatten(numbered), made))
        return out

    def _number(self, tensor: Tensor) -> Any:
        number = self.numbers.get(id(tensor))
        if number is None:  # from outside: it stays where it is
            return tensor
        return _Made(number)


class _Made:
    def __init__(self, number: int) -> None:
        self.number = number


class Tape(Capture):
    """Repeats noted operations."""

    def __init__(self) -> None:
        self.replayed = 0

    def record(self, fn: Callable[[], None]) -> Callable[[], None]:
        fn()
        with _Noting() as noting:
            fn()
        steps = noting.steps

        def replay() -> None:
            self.replayed += 1
            held: dict[int, Any] = {}

            def real(leaf: Any) -> Any:
                return held[leaf.number] if isinstance(leaf, _Made) else leaf

            for func, leaves, spec, made in steps:
                real_args, real_kwargs = tree_unflatten([real(leaf) for leaf in leaves], spec)
                held.update(zip(made, tensors_of(func(*real_args, **real_kwargs)), strict=True))

        return replay


def record_on(monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Capture] = Tape) -> None:
    """Have the runners that a test opens record with `kind`, and share none with other tests."""
    monkeypatch.setattr(graph_runner, "capture_for", lambda device: kind())
    monkeypatch.setattr(draftree.runner, "_runners", weakref.WeakKeyDictionary())


def passes(runner: Runner) -> CudaGraphRunner:
    """Return the runner as the one that records."""
    assert isinstance(runner, CudaGraphRunner)
    return runner


def tape(runner: Runner) -> Tape:
    """Return what records the passes of a runner."""
    found = passes(runner)._capture
    assert isinstance(found, Tape)
    return found
