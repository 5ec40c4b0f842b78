"""Where a tensor lies, for compiled functions: the one place that checks what they are handed.

C reads and writes bytes at addresses. A tensor of another type, on another device, or with gaps between its rows would
be read as something else, or written beyond its end, without an error anywhere: the text is then silently wrong, or the
process dies. So every address goes through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Address of a tensor's first element.

    Args:
        tensor: what C reads or writes.
        dtype: the type that C knows it by.

    Raises:
        RuntimeError: another type, another device, or gaps: C would read something else.
    """
    if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise RuntimeError(
            f"Compiled code reads contiguous {dtype} on the CPU, and this tensor of shape {list(tensor.shape)} is "
            f"{'' if tensor.is_contiguous() else 'not contiguous, '}{tensor.dtype} on {tensor.device}: please report "
            "this."
        )
    return tensor.data_ptr()


def optional_address(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
    """The same for a tensor that may be missing, which C knows as a null pointer."""
    return None if tensor is None else address(tensor, dtype)


def store_addresses(stores: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
    """Where the float32 keys and values of several layers lie: an array of addresses of each."""
    at = c_void_p * len(stores)
    keys, values = ([address(store, torch.float32) for store in own] for own in zip(*stores, strict=True))
    return at(*keys), at(*values)


def array_address(array: NDArray[Any], dtype: Any) -> int:
    """Address of a NumPy array's first element; `dtype` and errors as for `address`."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise RuntimeError(
            f"Compiled code reads contiguous {np.dtype(dtype)}, and this array of shape {list(array.shape)} is "
            f"{'' if array.flags.c_contiguous else 'not contiguous, '}{array.dtype}: please report this."
        )
    found: int = array.ctypes.data
    return found
