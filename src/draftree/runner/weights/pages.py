"""Memory of weights that were loaded from a file and copied, given back to the system."""

from __future__ import annotations

import ctypes
import mmap
import sys
from ctypes import c_size_t, c_void_p
from pathlib import Path

from torch import Tensor

NOT_NEEDED = 4  # MADV_DONTNEED of Linux


def drop_file_pages(tensor: Tensor) -> None:
    """Give back the memory of a tensor that lies in a file that is mapped into memory: it is read again where needed.

    What was written to the tensor since it was loaded is lost: only for a model just loaded, that nobody else uses. On
    other systems than Linux nothing is done.
    """
    if sys.platform != "linux" or not tensor.is_cpu:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and _of_file(begin, end):
        ctypes.CDLL(None).madvise(c_void_p(begin), c_size_t(end - begin), NOT_NEEDED)


def _of_file(begin: int, end: int) -> bool:
    """Whether these addresses belong to one mapped file."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= begin and end <= last:
            return inode != "0"
    return False
