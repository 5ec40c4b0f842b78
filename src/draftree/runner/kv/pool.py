"""Stores of keys and values that outlive their cache, for the next one of the same kind.

Every call of `generate` makes a cache of its own, and recordings read the memory of the cache that they were made with.
To record all again for every call would cost more than replays save, so the last stores are kept, recordings and all.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from draftree.runner.kv.cache import SlotCache

KEPT = 2  # caches
MOST_WASTE = 4  # times the columns needed, which a kept one may have

Stores = tuple[list[Tensor | None], list[Tensor | None], dict[Any, Any]]


class StorePool:
    """The stores of the last caches that went."""

    def __init__(self) -> None:
        self._held: list[Stores] = []

    def lend(self, layers: int, slots: int, capacity: int) -> SlotCache:
        """A cache on kept stores that fit, or an empty one; without a deep prefix. It brings its stores back."""
        cache = SlotCache(layers, slots, capacity)
        for number, (keys, values, notes) in enumerate(self._held):
            some = keys[0]
            assert some is not None
            if some.shape[0] == slots and cache.capacity <= some.shape[2] <= MOST_WASTE * cache.capacity:
                del self._held[number]
                cache.take_over(keys, values, notes)
                break
        weakref.finalize(cache, self._take_back, *cache.stores_and_notes).atexit = False
        return cache

    def _take_back(self, keys: list[Tensor | None], values: list[Tensor | None], notes: dict[Any, Any]) -> None:
        if all(store is not None for store in (*keys, *values)):
            self._held = [*self._held, (keys, values, notes)][-KEPT:]

    @property
    def nbytes(self) -> int:
        """Bytes of the stores that wait for a cache."""
        stores = [t for keys, values, _ in self._held for t in (*keys, *values) if t is not None]
        return sum(t.numel() * t.element_size() for t in stores)
