"""Room for stores of keys and values: what is kept for later goes where memory is needed now.

A cache that finds no memory has every pool give up its stores, whichever model they belong to, and asks once more. The
allocator of a GPU reuses or frees what they held before it refuses again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class GivesBack(Protocol):
    """Holds memory that nobody needs at the moment."""

    def give_back(self) -> None:
        """Let go of it; any thread may call."""


_keepers: weakref.WeakSet[GivesBack] = weakref.WeakSet()
_lock = threading.Lock()


def ask_when_full(keeper: GivesBack) -> None:
    """Have `keeper` give back what it holds when there is no memory for a store."""
    with _lock:
        _keepers.add(keeper)


def with_room(make: Callable[[], T]) -> T:
    """What `make` makes; where memory runs out, once more without what is kept for later.

    Raises:
        torch.OutOfMemoryError: there is no memory without it either.
    """
    try:
        return make()
    except torch.OutOfMemoryError:
        with _lock:
            keepers = list(_keepers)
    for keeper in keepers:
        keeper.give_back()
    return make()
