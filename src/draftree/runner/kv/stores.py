"""Keys and values of several layers as C finds them: kept rows go to their places in one call (`native/after.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

from torch import Tensor

from draftree.native import load_library
from draftree.native.addresses import address


class Stores:
    """Stores of equal shape on the CPU, to be changed in place.

    Args:
        library: the compiled functions.
        held: each [slots, heads, capacity, width], contiguous.
    """

    def __init__(self, library: ctypes.CDLL, held: Sequence[Tensor]) -> None:
        _, heads, capacity, width = held[0].shape
        self._call = library.layer_keep
        self._at = (c_void_p * len(held))(*(address(store, store.dtype) for store in held))
        self._shape: Any = len(held), heads, capacity, width * held[0].element_size()

    def keep(self, slot: int, base: int, first: int, columns: Sequence[int]) -> None:
        """Move columns base + columns[i] of a slot to base + first + i; they ascend, and none moves up."""
        self._call(self._at, *self._shape, slot, base, first, (c_int64 * len(columns))(*columns), len(columns))


def stores_of(held: Sequence[Tensor]) -> Stores | None:
    """The stores, if they are alike and lie on the CPU, and there is a compiled library."""
    library = load_library()
    if library is None or not held:
        return None
    alike = {(store.shape, store.dtype) for store in held}
    if len(alike) > 1 or not all(store.is_cpu and store.is_contiguous() for store in held):
        return None
    return Stores(library, held)
