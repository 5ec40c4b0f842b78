"""A small model that runs ahead of its text in one call: a row a request and step, each the best token of the last.

What a drafter asks of its own model is a handful of steps that each take less time than a call. `_ahead.h` makes them
one after the other; what comes back is what may follow each row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.host.cache import SlotCache
from draftree.host.compiled import LANES, CompiledHead, CompiledStack, _Pass


class _Ahead(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "keys", "values")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("embedding", "norm", "cosines", "sines", "head", "ends")),
        *((name, c_int64) for name in ("end_count", "last_position", "best")),
        ("epsilon", c_float),
        ("least", c_float),
    )


class Course(NamedTuple):
    """What may follow each row of a run ahead, likeliest first.

    Attributes:
        tokens: int64 [steps made, B, K].
        logp: float32 [steps made, B, K], their log-probabilities there.
    """

    tokens: np.ndarray
    logp: np.ndarray


class Runner:
    """Runs the layers of a compiled stack ahead.

    Args:
        library: the compiled functions.
        stack: all layers.
        head: final norm and head.
        embedding: float32 [V, d], contiguous.
    """

    def __init__(self, library: ctypes.CDLL, stack: CompiledStack, head: CompiledHead, embedding: Tensor) -> None:
        self._call = library.layer_ahead
        self._call.restype = c_int64
        self._call.argtypes = [POINTER(_Ahead), POINTER(_Pass), c_void_p, c_void_p, c_int64, *[c_void_p] * 4]
        self._stack, self._head, self._embedding = stack, head, embedding
        self._heads = [layer.parts.heads for layer in stack._layers]

    def run(
        self,
        cache: SlotCache,
        tables: tuple[Tensor, Tensor],
        positions: Sequence[int],
        given: np.ndarray,
        best: int,
        least: float,
        ends: Sequence[int],
        taking_part: Sequence[bool],
    ) -> Course:
        """See `Host.run_ahead`; `cache` is open for requests and steps, `tables` are cosines and sines by position."""
        batch, steps = given.shape
        matrix, (weight, epsilon) = self._head._packed.described, self._head._norm
        hidden, dim, threads = matrix.inputs, self._stack.dim, self._stack.threads(batch)
        starts = cache.starts
        sizes = (
            *(batch * dim, batch * dim, batch * self._stack.scratch),
            threads * (2 * dim + max(starts) + steps) * LANES,
            batch * (2 * hidden + matrix.outputs),
        )
        floats = torch.empty(sum(sizes))
        at = [floats.data_ptr() + 4 * before for before in np.cumsum((0, *sizes)).tolist()]
        visible = np.ones(batch, dtype=np.uint8)
        p = _Pass(
            *(batch, 1, cache.first, cache.capacity, (c_int64 * batch)(*starts)),
            *(at[0], at[1], at[2], threads, cache.prefix_length, 0, visible.ctypes.data, None, at[3]),
        )
        like = self._embedding
        stores = [cache.stores(i, kv, (width, width), like) for i, (kv, _, width) in enumerate(self._heads)]
        keys = (c_void_p * len(stores))(*(k.data_ptr() for k, _ in stores))
        values = (c_void_p * len(stores))(*(v.data_ptr() for _, v in stores))
        stops = (c_int64 * max(len(ends), 1))(*ends)
        cosines, sines = tables
        ahead = _Ahead(
            *(ctypes.addressof(self._stack._described), ctypes.addressof(keys), ctypes.addressof(values), len(stores)),
            *(self._embedding.data_ptr(), weight.data_ptr(), cosines.data_ptr(), sines.data_ptr()),
            *(ctypes.addressof(matrix), ctypes.addressof(stops), len(ends), len(cosines) - 1, best, epsilon, least),
        )
        places = np.array(positions, dtype=np.int64)
        paths = np.where(np.array(taking_part), np.float32(0), np.float32(-np.inf)).astype(np.float32)
        tokens = np.empty((steps, batch, best), dtype=np.int64)
        logp = np.empty((steps, batch, best), dtype=np.float32)
        arrays = (a.ctypes.data for a in (places, given))
        made = self._call(ahead, p, *arrays, steps, paths.ctypes.data, at[4], tokens.ctypes.data, logp.ctypes.data)
        return Course(tokens[:made], logp[:made])


def runner_of(library: Any, stack: CompiledStack | None, head: Any, embedding: Any) -> Runner | None:
    """A runner where all that it needs is compiled and plain."""
    if stack is None or not isinstance(head, CompiledHead) or type(embedding) is not torch.nn.Embedding:
        return None
    weight = embedding.weight.detach()
    if not weight.is_contiguous() or len({layer.parts.heads.dim for layer in stack._layers}) != 1:
        return None
    return Runner(library, stack, head, weight)
