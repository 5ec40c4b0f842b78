"""The package's C, built into one library by the build hook (hatch_build.py) and loaded here, through ctypes.

The Lookahead trie (`trie.c`) and the layers of the CPU runner (`layers.c`) use it. It does not use Python's C
interface, so one binary serves every Python version. Without the library, Python and tensor operations do the same
work more slowly.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

from draftree.native.structures import Matrix, Moving, Pass, T5Decoder

LIBRARY = Path(__file__).with_name("_draftree.so")
ABI = 31  # of layers.c
WIDEST = 256  # floats of the widest registers that it is compiled for: 16 of a vector, 256 of a matrix
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def library() -> ctypes.CDLL:
    """Load the compiled functions, without signatures.

    Raises:
        OSError: the library was not built or does not load.
    """
    return ctypes.CDLL(str(LIBRARY))


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """Return the library with the functions of `layers.c`; None if it was not built, is stale or does not load."""
    try:
        return started(library(), WIDEST)
    except (OSError, AttributeError):
        return None


def started(found: ctypes.CDLL, widest: int) -> ctypes.CDLL | None:
    """Set the signatures of a library and return it; None if it is stale.

    Args:
        widest: the most floats of a register that it may compute with, 4, 8 or 16 of a vector or 256 of a matrix; fewer
            where the processor has less.
    """
    found.layer_start.restype = c_int32
    found.layer_start.argtypes = [c_void_p] * 3 + [c_int32]
    process = ctypes.CDLL(None)
    known = all(hasattr(process, name) for name in OPENMP)  # else one thread does the work
    openmp = [ctypes.cast(getattr(process, name), c_void_p) if known else None for name in OPENMP]
    if found.layer_start(*openmp, widest) != ABI:
        return None
    found.layer_norm.argtypes = [c_void_p, c_void_p, c_float, c_int64, c_int64, c_int, c_void_p]
    found.layer_top.argtypes = [c_void_p, *[c_int64] * 3, c_void_p, c_void_p]
    found.layer_product.argtypes = [POINTER(Matrix), c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p]
    found.blocks_pack.argtypes = [c_int64, c_void_p, *[c_int64] * 4, c_void_p]
    found.blocks_floats.argtypes = [POINTER(Matrix), c_void_p, c_int64, c_void_p]
    found.blocks_pack.restype = found.blocks_floats.restype = None
    found.blocks_group.argtypes, found.blocks_group.restype = [c_int64, c_int64], c_int64
    found.layer_run.argtypes = [c_void_p, c_int64, POINTER(Pass), c_int64, *[c_void_p] * 4]
    found.states_move.argtypes, found.states_move.restype = [POINTER(Moving), c_int64, c_int64], None
    found.t5_pass.argtypes = [POINTER(T5Decoder), POINTER(Pass), *[c_void_p] * 3, *[c_int64] * 3, *[c_void_p] * 3]
    for name in ("norm", "top", "product", "run"):
        getattr(found, f"layer_{name}").restype = None
    found.t5_pass.restype = c_int64
    return found
