"""Layers in C on a CPU, several in one call.

A step of any model is products of a few rows with large matrices, which general libraries do at a fraction of the
processor's speed. `native/layers.c` has a product for few rows on weights laid out for it, the operations between the
products fused, and an attention that masks trees as it goes. It uses torch's own OpenMP threads.

Weights are float32, bfloat16, or torchao's of 8 bits. Rows, keys and values are float32 with all of them: those of a
bfloat16 model are rounded to its type where its `forward` rounds, so that they are numbers which bfloat16 has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from draftree.native import load_library
from draftree.native.structures import Layer, Pass, address, optional_address, store_addresses
from draftree.runner.cpu.states import CompiledDelta, recurrent_floats
from draftree.runner.eager.parts import Norm, Parts
from draftree.runner.eager.runner import Angles
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Segment
from draftree.runner.positions import Rotation
from draftree.runner.weights.packed import LANES, Packed, scratch_for

ROUNDS, NORMS_ROUND_TWICE = 1, 2  # where numbers are rounded to bfloat16 (`layers.c`)
WORTH_THREADS = 2_500_000  # multiplications of a pass under which waking other threads costs more than it saves


def rounding_of(norms: Sequence[Norm | None], dtype: torch.dtype) -> int:
    """Return C's flags for the places where a model of that dtype and norms rounds to bfloat16."""
    if dtype != torch.bfloat16:
        return 0
    return ROUNDS | (NORMS_ROUND_TWICE if any(norm is not None and norm.twice for norm in norms) else 0)


def threads_for(work: int, meetings: float = 1.0) -> int:
    """Return the number of threads for `work` multiplications; `meetings` counts barriers, in units of a layer's."""
    return torch.get_num_threads() if work > meetings * WORTH_THREADS else 1


def norm_rows(library: Any, norm: Norm, x: Tensor, rounding: int = 0) -> Tensor:
    """Return float32 rows [..., d] by a norm in float32; `rounding` is of `rounding_of`."""
    normed, width = torch.empty_like(x), x.shape[-1]
    at, by, to = (address(t, torch.float32) for t in (x, norm.weight, normed))
    library.layer_norm(at, by, norm.epsilon, x.numel() // width, width, rounding, to)
    return normed


class CompiledNorm(nn.Module):
    """A stock root-mean-square norm, in C."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.weight, self.eps = stock.weight, float(stock.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Scale float32 [..., d] to a mean square of 1, times the weight."""
        return norm_rows(load_library(), Norm(self.weight, self.eps), x.contiguous())


class CompiledLayer:
    """See `eager.layer.TensorLayer`; `window` is what it sees back, `rotation` of its heads, `dtype` the model's."""

    def __init__(self, parts: Parts, window: int | None, rotation: Rotation, dtype: torch.dtype) -> None:
        self.parts = parts
        self._packed = [Packed(linears) for linears in parts.products()]
        self.copied = sum(packed.nbytes for packed in self._packed)  # bytes of weights
        kv, groups, dim = parts.heads
        norms = [*parts.norms, *(parts.head_norms or (None, None)), *parts.behind]
        # Copies, as C keeps their addresses.
        self._weights = [None if norm is None else norm.weight.to(torch.float32, copy=True) for norm in norms]
        self._partner = None if rotation.plain else rotation.partner.int()
        self.delta = None if parts.delta is None else CompiledDelta(parts.delta, parts.heads)
        matrices = [packed.described for packed in self._packed]
        hidden = matrices[1].outputs
        self.described = Layer(
            *matrices,
            *(optional_address(weight, torch.float32) for weight in self._weights),
            optional_address(self._partner, torch.int32),
            *(0.0 if norm is None else norm.epsilon for norm in (*norms[:3], norms[4])),
            *(hidden, kv, groups, dim, parts.wide, parts.activation != "silu", rounding_of(norms, dtype)),
            *(window or 0, parts.scaling, parts.cap or 0.0),
            *(parts.gated, None if self.delta is None else ctypes.addressof(self.delta.described)),
        )
        queries = kv * groups * dim * (2 if parts.gated else 1)
        self.scratch = hidden + max(matrices[0].stride + queries, 2 * matrices[2].stride)  # floats a row
        self.widest = max(matrix.inputs for matrix in matrices)
        self.weights = sum(matrix.inputs * matrix.stride for matrix in matrices)  # in a row's products


class CompiledStack:
    """The layers of a model of type `dtype`, to be run in stretches."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[CompiledLayer], dtype: torch.dtype) -> None:
        self._run = library.layer_run
        self.layers, self.dtype = layers, dtype
        self.scratch = max(layer.scratch for layer in layers)
        self.widest = max(layer.widest for layer in layers)
        self.dim = max(layer.parts.heads.dim for layer in layers)
        self.weights = sum(layer.weights for layer in layers)
        self.deltas = [layer.delta for layer in layers if layer.delta is not None]

    def run(self, first: int, last: int, x: Tensor, angles: CompiledAngles, unread: int = 0) -> None:
        """Run layers [first, last) on x [B, n, d], in place.

        In a batch of one, the first `unread` rows of the result are not read, so their values are undefined.
        """
        keys, values = self.stores(angles.cache, x, first, last)
        some = [ctypes.addressof(layer.described) for layer in self.layers[first:last]]
        layers = (c_void_p * len(some))(*some)
        states = (c_void_p * len(some))()
        for number, layer in enumerate(self.layers[first:last]):
            if layer.delta is not None:
                states[number] = ctypes.addressof(angles.cache.describe(first + number, angles.offsets))
        self._run(layers, len(some), angles.described, unread, address(x, torch.float32), keys, values, states)

    def stores(self, cache: SlotCache, like: Tensor, first: int = 0, last: int | None = None) -> tuple[Any, Any]:
        """Return the addresses of a cache's keys and values for layers [first, last), by default for all."""
        found: list[tuple[Tensor | None, Tensor | None]] = []
        for number, layer in enumerate(self.layers[first:last], first):
            kv, _, dim = layer.parts.heads
            found.append((None, None) if layer.delta else cache.stores(number, kv, (dim, dim), like))
        return store_addresses(found)


class CompiledAngles:
    """`eager.layer.Angles` and visibility of a segment as C reads them, with scratch memory.

    Args:
        angles: of the rows, [B, n, 1, dim]; [1, R, 1, dim] of all real rows where there are `sizes`.
        sizes: rows of each request, the first ones, where rows behind them are left out and the others lie one behind
            the other; None where all are there.
        entry: [R, inputs], what layers without an input norm read in place of their rows; None where they read these.
    """

    def __init__(
        self,
        angles: Angles,
        segment: Segment,
        stack: CompiledStack,
        sizes: Sequence[int] | None = None,
        entry: Tensor | None = None,
    ) -> None:
        self.cache = angles.cache
        batch, n = segment.positions.shape
        starts = angles.cache.starts
        total = batch * n if sizes is None else sum(sizes)
        threads = threads_for(total * stack.weights)
        scores = (2 * stack.dim + max(starts) + n) * LANES
        scores = max([scores, *(recurrent_floats(n, delta.width, delta.dim) for delta in stack.deltas)])
        prefix_rows = segment.prefix_rows
        f32 = torch.float32  # the default type may be another one, and C reads floats
        tensors = [
            angles.cosine.float().contiguous(),
            angles.sine.float().contiguous(),
            torch.empty(total * stack.scratch, dtype=f32, device="cpu"),
            segment.visible.contiguous(),
            None if prefix_rows is None else prefix_rows.contiguous(),
            torch.empty(threads * scores, dtype=f32, device="cpu"),
            scratch_for(total, stack.widest),
            segment.positions.contiguous(),
            entry,
        ]
        kinds = f32, f32, f32, torch.bool, torch.bool, f32, f32, torch.long, f32
        cosine, sine, scratch, visible, prefix, room, laid, positions, read = map(optional_address, tensors, kinds)
        self.offsets = [0, *accumulate(sizes or [n] * batch)]  # of each request's rows
        counts = offsets = None
        if sizes is not None:
            counts, offsets = (c_int64 * batch)(*sizes), (c_int64 * (batch + 1))(*self.offsets)
        self._kept = tensors, (c_int64 * batch)(*starts), counts, offsets
        self.described = Pass(
            *(batch, n, angles.cache.first, angles.cache.capacity, self._kept[1]),
            *(cosine, sine, scratch, threads, angles.cache.prefix_length, segment.visible.shape[2] - n),
            *(visible, prefix, room),
            *(None if part is None else ctypes.addressof(part) for part in (counts, offsets)),
            *(angles.cosine.dtype == torch.float32, laid, positions, read),
        )


class CompiledHead:
    """See `eager.layer.TensorHead`; `dtype` is the model's."""

    def __init__(
        self, library: ctypes.CDLL, norm: Norm, head: Any, dtype: torch.dtype, cap: float | None = None
    ) -> None:
        self._library, self._dtype, self._cap = library, dtype, cap
        self._norm, self._rounding = Norm(norm.weight.float(), norm.epsilon), rounding_of([norm], dtype)
        self._packed = Packed([head])
        self.copied = self._packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.product(norm_rows(self._library, self._norm, x.float().contiguous(), self._rounding))
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def product(self, read: Tensor) -> Tensor:
        """Return the logits [B, n, V] of normed states [B, n, d], not capped."""
        read = read.float().contiguous()
        matrix = self._packed.described
        logits = read.new_empty(*read.shape[:2], matrix.outputs)
        rows = read.shape[0] * read.shape[1]
        scratch = scratch_for(rows, read.shape[2])
        at, by, to = (address(t, torch.float32) for t in (read, scratch, logits))
        threads = threads_for(rows * matrix.inputs * matrix.outputs, 0.25)
        self._library.layer_product(matrix, at, rows, threads, 0, by, to)
        return logits.to(self._dtype)
