"""Stores of keys and values that outlive their cache, for the next one of the same kind.

Every call of `generate` makes a cache of its own, and recordings read the memory of the cache that they were made with.
To record all again for every call would cost more than replays save, so the last stores are kept, recordings and all,
until a cache finds no memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from torch import Tensor

from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.room import ask_when_full

KEPT = 2  # caches
MOST_WASTE = 4  # times the columns needed, which a kept one may have

Stores = tuple[list[Tensor | None], list[Tensor | None], dict[Any, Any]]


class StorePool:
    """The stores of the last caches that went; any thread may lend, and a finalizer brings back at any moment."""

    def __init__(self) -> None:
        self._held: deque[Stores] = deque(maxlen=KEPT)
        ask_when_full(self)

    def give_back(self) -> None:
        """Let go of the stores that wait for a cache."""
        self._held.clear()

    def lend(self, layers: int, slots: int, capacity: int, kind: type[SlotCache] = SlotCache) -> SlotCache:
        """A cache on kept stores that fit, or an empty one; without a deep prefix. It brings its stores back."""
        cache = kind(layers, slots, capacity)
        for _ in range(KEPT):
            try:
                stores = self._held.popleft()  # nobody else can take these now
            except IndexError:
                break
            some = stores[0][0]
            assert some is not None
            if some.shape[0] == slots and cache.capacity <= some.shape[2] <= MOST_WASTE * cache.capacity:
                cache.take_over(*stores)
                break
            self._held.append(stores)
        weakref.finalize(cache, self._take_back, *cache.stores_and_notes).atexit = False
        return cache

    def _take_back(self, keys: list[Tensor | None], values: list[Tensor | None], notes: dict[Any, Any]) -> None:
        if all(store is not None for store in (*keys, *values)):
            self._held.append((keys, values, notes))

    @property
    def nbytes(self) -> int:
        """Bytes of the stores that wait for a cache."""
        stores = [t for keys, values, _ in self._held for t in (*keys, *values) if t is not None]
        return sum(t.numel() * t.element_size() for t in stores)
