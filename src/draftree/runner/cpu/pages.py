"""Advice to the system about the memory that weights lie in; where it takes none, all stays as it is."""

from __future__ import annotations

import ctypes
import mmap
import sys
from ctypes import c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

HUGE_PAGE = 2 * 2**20
HUGE, NOT_NEEDED = 14, 4  # MADV_HUGEPAGE and MADV_DONTNEED of Linux


@lru_cache(maxsize=1)
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def advises() -> bool:
    """Whether this system takes advice."""
    return _madvise() is not None


def on_huge_pages(address: int, size: int) -> None:
    """Ask for pages of 2 MiB for so many bytes, which saves a step some waiting."""
    if advises():
        _madvise()(c_void_p(address), c_size_t(size), HUGE)


def drop_file_pages(tensor: Tensor) -> None:
    """Give back the memory of a tensor that lies in a file that is mapped into memory: it is read again where needed.

    What was written to the tensor since it was loaded is lost: only for a model just loaded, that nobody else uses.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.is_cpu and begin < end and advises() and _of_file(begin, end):
        _madvise()(c_void_p(begin), c_size_t(end - begin), NOT_NEEDED)


def _of_file(begin: int, end: int) -> bool:
    """Whether these addresses belong to one mapped file."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= begin and end <= last:
            return inode != "0"
    return False
