"""Layers in C for float32 on a CPU, loaded through ctypes: several in one call, or the halves of `layer` in one each.

A step of a small model is mostly overhead of tensor operations, and a step of any model is products of a few rows with
large matrices, which general libraries do at a fraction of the processor's speed. `_layer.c` has both: the operations
between the products fused, an attention that masks trees as it goes, and a product for few rows on weights laid out
for it. It uses torch's own OpenMP
threads. The build hook (hatch_build.py) makes `_layer.so`; where it is missing, the tensor operations do.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.native import address, array_address, optional_address
from draftree.runner.cpu.packed import LANES, Matrix, Packed
from draftree.runner.cpu.threads import Pace
from draftree.runner.eager.layer import Angles
from draftree.runner.eager.parts import Norm, Parts
from draftree.runner.kv.cache import SlotCache
from draftree.runner.layout.rotary import Rotation
from draftree.runner.layout.skip import Omitted
from draftree.runner.plan import Segment

LIBRARY = Path(__file__).with_name("_layer.so")
ABI = 11
WORTH_THREADS = 2_500_000  # multiplications of a pass under which waking other threads costs more than it saves
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class _Layer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("behind_attention", "behind_mlp", "partner")),
        *((name, c_float) for name in ("input_epsilon", "post_epsilon", "head_epsilon", "behind_epsilon")),
        *((name, c_int32) for name in ("hidden", "kv_heads", "groups", "dim", "wide", "gelu", "skips")),
        ("scaling", c_float),
    )


class _Pass(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "rows", "first", "capacity")),
        ("starts", POINTER(c_int64)),
        *((name, c_void_p) for name in ("cosine", "sine", "scratch")),
        *((name, c_int64) for name in ("threads", "prefix", "back")),
        *((name, c_void_p) for name in ("visible", "prefix_rows", "scores", "counts", "offsets")),
    )


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The compiled halves, ready for calls; None when they were not built, are stale or do not load."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.layer_start.restype = c_int32
        library.layer_start.argtypes = [c_void_p] * 3
    except (OSError, AttributeError):
        return None
    process = ctypes.CDLL(None)
    found = all(hasattr(process, name) for name in OPENMP)  # else one thread does the work
    openmp = [ctypes.cast(getattr(process, name), c_void_p) if found else None for name in OPENMP]
    if library.layer_start(*openmp) != ABI:
        return None
    library.layer_norm.argtypes = [c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p]
    library.layer_product.argtypes = [POINTER(Matrix), c_void_p, c_int64, c_int64, c_int, c_void_p]
    library.layer_enter.argtypes = [POINTER(_Layer), POINTER(_Pass), *[c_void_p] * 4]
    library.layer_leave.argtypes = [POINTER(_Layer), POINTER(_Pass), c_void_p, c_int64, c_int64, c_int64, c_void_p]
    library.layer_run.argtypes = [c_void_p, c_int64, POINTER(_Pass), c_void_p, c_void_p, c_void_p]
    library.layer_keep.argtypes = [c_void_p, *[c_int64] * 7, c_void_p, c_int64]
    library.layer_best.argtypes = [POINTER(Matrix), c_void_p, c_float, *[c_void_p] * 2, *[c_int64] * 3, *[c_void_p] * 3]
    for name in ("norm", "product", "enter", "leave", "run", "keep", "best"):
        getattr(library, f"layer_{name}").restype = None
    return library


class CompiledLayer:
    """See `layer.TensorLayer`; `rotation` is of its heads."""

    def __init__(self, library: ctypes.CDLL, parts: Parts, rotation: Rotation) -> None:
        self.parts, self.omitted = parts, Omitted(0)
        self._enter, self._leave = library.layer_enter, library.layer_leave
        self._packed = [Packed(linears) for linears in parts.products()]
        kv, groups, dim = parts.heads
        norms = [*parts.norms, *(parts.head_norms or (None, None)), *parts.behind]
        self._partner = None if rotation.plain else rotation.partner.int()
        matrices = [packed.described for packed in self._packed]
        hidden = matrices[0].inputs
        self._described = _Layer(
            *matrices,
            *(None if norm is None else address(norm.weight, torch.float32) for norm in norms),
            optional_address(self._partner, torch.int32),
            *(0.0 if norm is None else norm.epsilon for norm in (*norms[:3], norms[4])),
            *(hidden, kv, groups, dim, parts.wide, parts.activation != "silu", 0),
            parts.scaling,
        )
        queries = kv * groups * dim
        self.scratch = hidden + max(matrices[0].outputs + queries, 2 * matrices[2].outputs)  # floats a row

    def without(self, parts: Omitted) -> CompiledLayer:
        """See `layer.TensorLayer.without`; the weights are shared."""
        lesser = copy.copy(self)
        lesser.omitted = parts
        lesser._described = _Layer.from_buffer_copy(self._described)
        lesser._described.skips = int(parts)
        return lesser

    def enter(self, x: Tensor, angles: CompiledAngles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `layer.TensorLayer.enter`."""
        kv, groups, dim = self.parts.heads
        keys, values = angles.cache.stores(index, kv, (dim, dim), x)
        query = x.new_empty(x.shape[0], kv, groups * x.shape[1], dim)
        self._enter(self._described, angles.described, *(address(t, torch.float32) for t in (x, query, keys, values)))
        return query, *angles.cache.views(index, x.shape[1])

    def leave(self, x: Tensor, mixed: Tensor | None, angles: CompiledAngles) -> Tensor:
        """See `layer.TensorLayer.leave`."""
        if mixed is None:
            self._leave(self._described, angles.described, None, 0, 0, 0, address(x, torch.float32))
            return x
        by_request, by_head, by_row, by_value = mixed.stride()
        if by_value != 1:
            return self.leave(x, mixed.contiguous(), angles)
        at, to = address(mixed, torch.float32, strided=True), address(x, torch.float32)
        self._leave(self._described, angles.described, at, by_request, by_head, by_row, to)
        return x


class CompiledStack:
    """Layers of a model, to be run in stretches: all of them, or those with the given `numbers`.

    Stacks of one model share the `pace` that knows what its passes take.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[CompiledLayer],
        numbers: Sequence[int] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._run = library.layer_run
        self._layers = layers
        self.numbers = range(len(layers)) if numbers is None else numbers
        self._described = (c_void_p * len(layers))(*(ctypes.addressof(layer._described) for layer in layers))
        self.scratch = max(layer.scratch for layer in layers)
        self.dim = max(layer.parts.heads.dim for layer in layers)
        by_layer = [sum(p.described.inputs * p.described.outputs for p in layer._packed) for layer in layers]
        self.weights, self._by_layer = sum(by_layer), by_layer  # in a row's products
        self.pace = pace or Pace()

    def threads(self, rows: int) -> int:
        """Threads for a pass of so many rows."""
        return self.pace.threads(rows * self.weights, WORTH_THREADS)

    def run(self, first: int, last: int, x: Tensor, angles: CompiledAngles) -> None:
        """Its layers [first, last) on x [B, n, d], in place; the rows of the pass see all of the context."""
        keys, values = self.stores(angles.cache, x, first, last)
        layers = ctypes.byref(self._described, first * ctypes.sizeof(c_void_p))
        began = self.pace.clock()
        self._run(layers, last - first, angles.described, address(x, torch.float32), keys, values)
        work = x.shape[0] * x.shape[1] * sum(self._by_layer[first:last])
        self.pace.took(work, angles.described.threads, began)

    def stores(self, cache: SlotCache, like: Tensor, first: int = 0, last: int | None = None) -> tuple[Any, Any]:
        """Where a cache has the keys and the values of layers [first, last), by default of all: arrays of addresses."""
        found = []
        for number, layer in zip(self.numbers[first:last], self._layers[first:last], strict=True):
            kv, _, dim = layer.parts.heads
            found.append(cache.stores(number, kv, (dim, dim), like))
        at = c_void_p * len(found)
        keys, values = ([address(store, torch.float32) for store in stores] for stores in zip(*found, strict=True))
        return at(*keys), at(*values)


class CompiledAngles:
    """`layer.Angles` and visibility of a segment as C reads them, with scratch memory."""

    def __init__(self, angles: Angles, segment: Segment, stack: CompiledStack) -> None:
        self.cache = angles.cache
        batch, n = segment.positions.shape
        starts = angles.cache.starts
        threads = stack.threads(batch * n)
        prefix_rows = segment.prefix_rows
        tensors = [
            angles.cosine.contiguous(),
            angles.sine.contiguous(),
            torch.empty(batch * n * stack.scratch, dtype=torch.float32, device="cpu"),
            segment.visible.contiguous(),
            None if prefix_rows is None else prefix_rows.contiguous(),
            torch.empty(threads * (2 * stack.dim + max(starts) + n) * LANES, dtype=torch.float32, device="cpu"),
        ]
        self._kept = tensors, (c_int64 * batch)(*starts)
        kinds = torch.float32, torch.float32, torch.float32, torch.bool, torch.bool, torch.float32
        cosine, sine, scratch, visible, prefix, scores = map(optional_address, tensors, kinds)
        self.described = _Pass(
            *(batch, n, angles.cache.first, angles.cache.capacity, self._kept[1]),
            *(cosine, sine, scratch, threads, angles.cache.prefix_length, segment.visible.shape[2] - n),
            *(visible, prefix, scores),
        )


class CompiledHead:
    """See `layer.TensorHead`."""

    def __init__(self, library: ctypes.CDLL, norm: Norm, head: Any, cap: float | None = None) -> None:
        self._library = library
        self._norm, self._cap = norm, cap
        self._packed, self._pace = Packed([head]), Pace()

    def threads(self, rows: int) -> int:
        """Threads for the logits of so many rows."""
        matrix = self._packed.described
        return self._pace.threads(rows * matrix.inputs * matrix.outputs, WORTH_THREADS // 4)

    def __call__(self, x: Tensor) -> Tensor:
        """See `layer.TensorHead`."""
        x = x.contiguous()
        rows, width = x.shape[0] * x.shape[1], x.shape[2]
        normed = torch.empty_like(x)
        weight, epsilon = self._norm
        at, by, to = (address(t, torch.float32) for t in (x, weight, normed))
        self._library.layer_norm(at, by, epsilon, rows, width, to)
        matrix = self._packed.described
        logits = x.new_empty(*x.shape[:2], matrix.outputs)
        threads, began = self.threads(rows), self._pace.clock()
        self._library.layer_product(matrix, to, rows, threads, 0, address(logits, torch.float32))
        self._pace.took(rows * width * matrix.outputs, threads, began)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def product(self, read: Tensor) -> Tensor:
        """Logits [B, n, V] of normed states [B, n, d]."""
        read = read.contiguous()
        matrix = self._packed.described
        logits = read.new_empty(*read.shape[:2], matrix.outputs)
        rows = read.shape[0] * read.shape[1]
        at, to = address(read, torch.float32), address(logits, torch.float32)
        self._library.layer_product(matrix, at, rows, self.threads(rows), 0, to)
        return logits

    def best(self, hidden: Tensor, rows: Sequence[Sequence[int]], count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """See `Runner.best`; None where logits are capped, or states of another type. hidden: contiguous."""
        if self._cap is not None or hidden.dtype != torch.float32:
            return None
        batch, depth = len(rows), len(rows[0])
        matrix, (weight, epsilon) = self._packed.described, self._norm
        # Rows of a request lie behind those of the requests before it.
        places = [row + b * hidden.shape[1] if row >= 0 else -1 for b, of in enumerate(rows) for row in of]
        tokens, logp = np.empty((batch, depth, count), np.int64), np.empty((batch, depth, count), np.float32)
        work = torch.empty(len(places) * (matrix.inputs + matrix.outputs), dtype=torch.float32, device="cpu")
        threads, began = self.threads(len(places)), self._pace.clock()
        self._library.layer_best(
            *(matrix, address(weight, torch.float32), epsilon, address(hidden, torch.float32)),
            *((c_int64 * len(places))(*places), len(places), threads, count, address(work, torch.float32)),
            *(array_address(tokens, np.int64), array_address(logp, np.float32)),
        )
        self._pace.took(len(places) * matrix.inputs * matrix.outputs, threads, began)
        return tokens, logp
