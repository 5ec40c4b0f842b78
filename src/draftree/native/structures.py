"""The structures of `layers.c`, and addresses of tensors for compiled functions.

Fields stand in C's order, and their meaning is described there. C reads and writes bytes at addresses: a tensor of
another dtype, on another device or with gaps between its rows would be misread without an error. So every address is
checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Matrix(Structure):
    """A matrix of packed weights (`products.h`)."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias", "scales")),
        *((name, c_int64) for name in ("inputs", "outputs", "kind", "rounds", "stride")),
        ("beside", c_void_p),
    )


def beside(matrices: Sequence[Matrix]) -> Matrix:
    """Join matrices of blocks with the same inputs into one with all outputs; the caller holds references to them."""
    outputs = sum(matrix.outputs for matrix in matrices)
    for matrix, following in zip(matrices, [*matrices[1:], None], strict=True):
        matrix.stride, matrix.beside = outputs, None if following is None else addressof(following)
    return matrices[0]


class Layer(Structure):
    """The weights of one decoder layer (`layers.c`)."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("behind_attention", "behind_mlp", "partner")),
        *((name, c_float) for name in ("input_epsilon", "post_epsilon", "head_epsilon", "behind_epsilon")),
        *((name, c_int32) for name in ("hidden", "kv_heads", "groups", "dim", "wide", "gelu", "rounding")),
        ("window", c_int32),
        *((name, c_float) for name in ("scaling", "cap")),
        ("gated", c_int32),
        ("delta", c_void_p),
    )


class Delta(Structure):
    """What a layer has in the place of attention (`kernels.h`)."""

    _fields_ = (
        *((name, c_void_p) for name in ("conv", "conv_bias", "decay", "bias", "norm")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("kernel", "width", "channels")),
    )


class States(Structure):
    """A recurrent layer's states, and what it keeps of a pass (`kernels.h`)."""

    _fields_ = (
        *((name, c_void_p) for name in ("conv", "states")),
        ("rows", c_int64),
        *((name, c_void_p) for name in ("inputs", "keys", "deltas", "paths", "next_conv", "next")),
    )


class Moving(Structure):
    """A commit of recurrent states (`kernels.h`)."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "states")),
        *((name, c_int64) for name in ("batch", "first")),
        *((name, c_void_p) for name in ("begins", "paths", "scratch")),
        ("floats", c_int64),
    )


class Pass(Structure):
    """The values that all layers of a pass share (`layers.c`)."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "rows", "first", "capacity")),
        ("starts", POINTER(c_int64)),
        *((name, c_void_p) for name in ("cosine", "sine", "scratch")),
        *((name, c_int64) for name in ("threads", "prefix", "back")),
        *((name, c_void_p) for name in ("visible", "prefix_rows", "scores", "counts", "offsets")),
        ("exact_angles", c_int64),
        *((name, c_void_p) for name in ("laid", "positions", "entry")),
    )


class T5Layer(Structure):
    """The weights of one decoder layer of T5, and its attention's source (`t5.h`)."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "query", "crossed", "up", "gate", "down")),
        *((name, c_void_p) for name in ("norm", "cross_norm", "mlp_norm", "keys", "values")),
    )


class T5Decoder(Structure):
    """T5's decoder, and the values that all rows of a pass share (`t5.h`)."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "bias", "lengths", "places")),
        *((name, c_void_p) for name in ("embedding", "closing", "head")),
        ("vocabulary", c_int64),
        *((name, c_int64) for name in ("count", "hidden", "heads", "dim", "inner", "columns", "distances")),
        ("epsilon", c_float),
        ("longest", c_int64),
        *((name, c_void_p) for name in ("scores", "distance")),
    )


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor's first element.

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
    """Return the address of a tensor, or None, which C reads as a null pointer."""
    return None if tensor is None else address(tensor, dtype)


def store_addresses(stores: Sequence[tuple[Tensor | None, Tensor | None]]) -> tuple[Any, Any]:
    """Return an array of the addresses of several layers' float32 keys, and one of their values."""
    at = c_void_p * len(stores)
    keys, values = ([optional_address(store, torch.float32) for store in own] for own in zip(*stores, strict=True))
    return at(*keys), at(*values)


def array_address(array: NDArray[Any], dtype: Any) -> int:
    """Return the address of a NumPy array's first element; `dtype` and errors as for `address`."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise RuntimeError(
            f"Compiled code reads contiguous {np.dtype(dtype)}, and this array of shape {list(array.shape)} is "
            f"{'' if array.flags.c_contiguous else 'not contiguous, '}{array.dtype}: please report this."
        )
    found: int = array.ctypes.data
    return found
