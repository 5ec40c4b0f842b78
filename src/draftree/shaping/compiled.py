"""The compiled twin of what planned steps and courses count (`_counts.c`), loaded through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY = Path(__file__).with_name("_counts.so")
ABI = 5
AHEAD = 24  # most guesses of a tree in a step that is not planned
BINS = 24  # of log-probabilities, the highest first; the last one holds all that is below
KINDS = 3  # of trees: good, middling and bad ones
PARTS, LEVELS = 3, 12  # of a tree's guesses, and bins of each; the last one holds all that is below
CELLS = PARTS * LEVELS

_met: tuple[np.ndarray | None, int] = (None, 0)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled twin, ready for calls; None when it was not built, is stale or does not load."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.counts_abi.restype = c_int64
        if library.counts_abi() != ABI * 10000000 + CELLS * 100000 + AHEAD * 1000 + BINS * 10 + KINDS:
            return None
    except (OSError, AttributeError):
        return None
    library.counts_plan.restype = library.counts_ahead.restype = library.counts_learn.restype = c_int64
    library.counts_course.restype = c_int64
    library.counts_course.argtypes = [
        *[c_void_p] * 5,
        *[c_int64] * 3,
        *(c_void_p, c_double, c_void_p, c_double, c_void_p, c_double),
    ]
    library.counts_read.restype, library.counts_read.argtypes = None, [c_void_p] * 3
    pointers: list[Any] = [c_void_p] * 4
    library.counts_plan.argtypes = [
        *(c_void_p, c_int64, c_int64, *pointers),
        *(c_void_p, c_void_p, c_int, c_void_p, c_void_p),
    ]
    library.counts_ahead.argtypes = [c_void_p, c_int64, c_void_p, c_double, c_int, *[c_void_p] * 4]
    library.counts_learn.argtypes = [*[c_void_p] * 3, c_int64, c_void_p, c_int64, c_int, *[c_void_p] * 4]
    return library


def address_of(numbers: np.ndarray) -> int:
    """Where an array lies; of the one asked for last it is known, as to ask takes as long as to plan."""
    global _met
    held, at = _met
    if held is not numbers:
        at = numbers.ctypes.data
        _met = numbers, at
    return at
