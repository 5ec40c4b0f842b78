"""Rotary angles of rows that have changed in mid-stack: the model's own rotary modules, called once more.

A stock model makes the angles of all its rows before its first layer and hands them to each. When rows leave or join
between two layers, the later layers need the angles of the rows that there are then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftree.runner.target import Target


class _Call(NamedTuple):
    """A call of a rotary module in this pass, and what it returned."""

    module: nn.Module
    args: Any
    kwargs: dict[str, Any]
    output: Any


class RotaryCalls:
    """The calls of a model's rotary modules in one pass, to be repeated for other rows."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._again: dict[int, Any] = {}
        self._repeating = False

    def note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook of rotary modules."""
        if not self._repeating:
            self._calls.append(_Call(module, args, kwargs, output))

    def rows_changed(self) -> None:
        """Forget the angles of earlier rows."""
        self._again = {}

    def repeated(self, stock: Any, positions: Tensor, hidden: Tensor) -> Any:
        """What the module that made `stock` makes of rows at `positions` [B, n] with states [B, n, d].

        None where no rotary module made it.
        """
        call = next((call for call in self._calls if _made(stock, call.output)), None)
        if call is None:
            return None
        if id(call.output) not in self._again:
            kwargs = {k: positions if k == "position_ids" else v for k, v in call.kwargs.items()}
            args = [_swapped(a, positions, hidden) for a in call.args]
            self._repeating = True
            try:
                self._again[id(call.output)] = call.module(*args, **kwargs)
            finally:
                self._repeating = False
        return self._again[id(call.output)]


def _made(stock: Any, output: Any) -> bool:
    """Whether these are the same angles, or tuples that begin with the same."""
    return output is stock or (isinstance(output, tuple) and isinstance(stock, tuple) and output[0] is stock[0])


def _swapped(argument: Any, positions: Tensor, hidden: Tensor) -> Any:
    """Positions and states in place of those of the earlier rows, on their device, which need not be this layer's."""
    if not torch.is_tensor(argument):
        return argument
    return (positions if argument.dtype == torch.long else hidden).to(argument.device)


def outer_rotary_modules(target: Target) -> Sequence[nn.Module]:
    """Rotary modules of the decoder that lie in no layer."""
    inside = {id(m) for layer in target.layers for m in layer.modules()}
    modules = target.decoder.modules()
    return [m for m in modules if "rotary" in type(m).__name__.lower() and id(m) not in inside]
