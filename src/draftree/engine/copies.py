"""Copies of a user's logits processors and stopping criteria, one for each text of a batch.

A deep copy of a function is the function itself, so one that counts in a variable around it would count for all texts
at once. Here its variables are copied as an object's attributes are. Models and tokenizers are shared by all copies:
they are large, and a call does not change them.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Iterable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

SHARED = (PreTrainedTokenizerBase, nn.Module)  # what copies have in common: large, and not changed by a call


def shared_parts(values: Iterable[Any]) -> dict[int, Any]:
    """The models, tokenizers and modules that `values` hold at any depth, by id: what a copy is to share with them."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    left = list(values)
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (*SHARED, ModuleType)):
            found[id(value)] = value
        elif isinstance(value, (type, Tensor, str, bytes, int, float)):
            continue
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        elif isinstance(value, MethodType):
            left.append(value.__self__)
        elif isinstance(value, FunctionType):
            left.extend(cell.cell_contents for cell in value.__closure__ or ())
        elif hasattr(value, "__dict__"):
            left.extend(vars(value).values())
    return found


def own_copy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, of functions and of those in attributes too; `memo` as of `copy.deepcopy`.

    Raises:
        Exception: something in it cannot be copied.
    """
    if isinstance(value, FunctionType):
        return memo[id(value)] if id(value) in memo else _function(value, memo)
    own = copy.deepcopy(value, memo)
    if own is not value and hasattr(value, "__dict__"):
        for name, held in vars(value).items():
            if isinstance(held, FunctionType):
                vars(own)[name] = own_copy(held, memo)
    return own


def _function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if set(vars(function)) - {"__wrapped__"}:
        raise TypeError("it has attributes, which are found by its name and not in a copy")
    if any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(function)):
        raise TypeError("it assigns a global variable")
    closure = function.__closure__ or ()
    fresh = [cell for cell in closure if id(cell) not in memo]  # two functions may share a variable
    memo.update((id(cell), CellType()) for cell in fresh)
    cells = tuple(memo[id(cell)] for cell in closure)
    own = FunctionType(function.__code__, function.__globals__, function.__name__, closure=cells)
    memo[id(function)] = own  # before its variables, as it may be one of them
    own.__defaults__ = own_copy(function.__defaults__, memo)
    own.__kwdefaults__ = own_copy(function.__kwdefaults__, memo)
    for cell in fresh:
        memo[id(cell)].cell_contents = own_copy(cell.cell_contents, memo)
    return own
