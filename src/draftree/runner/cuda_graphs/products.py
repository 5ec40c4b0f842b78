"""Batch-invariant matrix products with weights of 16 bits, as a Triton kernel: no row depends on the others.

A library's product adds in an order that it chooses by the number of rows. So a row among others has other last bits
than alone, and two tokens that are nearly tied change places. Here the order of each row's sums depends on the shape of
the weights alone.

A step of few rows waits for the weights to be read. They are read once for up to 128 rows, without a copy in another
layout, and linears with the same input are one kernel. Where a weight has too few outputs to keep a GPU busy, several
programs divide its input (split K), and the next kernel adds up their sums (`kernels.add_norm`).

`KernelLayer` is a decoder layer of a recorded pass on a GPU, in the kernels of `kernels` and, in 16 bits, of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftree.runner.cuda_graphs.kernels import IS_GELU, activated, add_norm, gated, rotate_and_store
from draftree.runner.eager.parts import Norm, StockProduct
from draftree.runner.eager.runner import Angles, TensorHead, TensorLayer

MOST_LINEARS = 3  # with the same input, in one kernel
ENOUGH_OUTPUTS = 64 * 128  # keep a GPU busy: the largest have about 128 processors, and a tile often has 64 outputs
PART_UNIT = 128  # the inputs of a part are a multiple of this
MOST_PARTS = 8
LEAST_ROWS, MOST_ROWS = 16, 128  # of one program
MOST_STAGES = 4
LEAST_SHARED = 99 * 1024  # bytes of shared memory that one program may have on the smallest of these devices

Linear = tuple[Tensor, Tensor | None]  # weight [out, in] and bias [out]


class Tiling(NamedTuple):
    """The share of one program."""

    rows: int  # Of the input.
    outputs: int  # Of one linear.
    inputs: int  # Entries of the input that are read at a time.
    warps: int  # Of 32 threads.


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, w0, w1, w2, b0, b1, b2, out, rows, width, N0, N1, N2, K, part_inputs,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Compute a tile: some outputs of one linear for some rows, summed over one part of the input.

    Linear i has N_i outputs, the first of which is column `first` of the `width` columns of `out`. If GATED, a tile
    has the same outputs of the first two linears: the activation of one, times the other. EVEN says that the input's K
    columns are a multiple of IN.
    """
    tile, part = tl.program_id(0), tl.program_id(2)
    w, bias, count, first, own_tile = w0, b0, N0, 0, tile
    if not GATED:
        tiles0 = (N0 + OUT - 1) // OUT
        tiles1 = (N1 + OUT - 1) // OUT
        if tile >= tiles0 + tiles1:
            w, bias, count, first, own_tile = w2, b2, N2, N0 + N1, tile - tiles0 - tiles1
        elif tile >= tiles0:
            w, bias, count, first, own_tile = w1, b1, N1, N0, tile - tiles0
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = own_tile * OUT + tl.arange(0, OUT)
    column = tl.arange(0, IN)
    real_row, real_output = row < rows, output < count
    x_place = x + row.to(tl.int64)[None, :] * K + column[:, None]
    w_place = output.to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros([OUT, ROWS], tl.float32)
    second = tl.zeros([OUT, ROWS], tl.float32)  # of the linear that is multiplied by the activation
    for begin in range(part * part_inputs, tl.minimum(K, part * part_inputs + part_inputs), IN):
        w_mask, x_mask = real_output[:, None], real_row[None, :]
        if not EVEN:
            real_column = column < K - begin
            w_mask, x_mask = w_mask & real_column[None, :], x_mask & real_column[:, None]
        a = tl.load(w + w_place + begin, mask=w_mask, other=0.0, eviction_policy="evict_first")
        b = tl.load(x_place + begin, mask=x_mask, other=0.0)
        total = tl.dot(a, b, total)
        if GATED:
            c = tl.load(w1 + w_place + begin, mask=w_mask, other=0.0, eviction_policy="evict_first")
            second = tl.dot(c, b, second)
    if BIAS:
        if part == 0:
            total += tl.load(bias + output, mask=real_output, other=0.0).to(tl.float32)[:, None]
        if GATED:
            second += tl.load(b1 + output, mask=real_output, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = activated(total.to(out.dtype.element_ty).to(tl.float32), GELU).to(out.dtype.element_ty)
        total = gate.to(tl.float32) * second.to(out.dtype.element_ty).to(tl.float32)
    place = (part.to(tl.int64) * rows + row.to(tl.int64))[None, :] * width + first + output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real_row[None, :] & real_output[:, None])


def product(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """Return the linears' outputs side by side, [..., out].

    Args:
        x: [..., in], of 16 bits.
        linears: up to three with that input, of x's type; all have a bias, or none has.
    """
    out = x.new_empty(*x.shape[:-1], sum(len(weight) for weight, _ in linears))
    _run(x, linears, out[None])
    return out


def product_in_parts(x: Tensor, linear: Linear) -> Tensor:
    """Return summands of a linear's outputs of x [..., in]: [1, ..., out] of x's type, or float32 [P, ..., out]."""
    outputs, inputs = linear[0].shape
    parts = 1
    while parts < MOST_PARTS and outputs * parts < ENOUGH_OUTPUTS and inputs >= 4 * parts * PART_UNIT:
        parts *= 2
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty(parts, *x.shape[:-1], outputs, dtype=dtype, device=x.device)
    _run(x, [linear], out)
    return out


def gated_product(x: Tensor, gate: Linear, up: Linear, activation: str) -> Tensor:
    """Return the activation of one linear's outputs, times the other's: [..., out] of x [..., in]."""
    out = x.new_empty(*x.shape[:-1], len(gate[0]))
    _run(x, (gate, up), out[None], activation)
    return out


def _run(x: Tensor, linears: Sequence[Linear], out: Tensor, activation: str | None = None) -> None:
    """Write the linears' outputs to `out` [P, ..., out]; the gated ones of two where there is an activation."""
    inputs, outputs, parts, is_gated = x.shape[-1], out.shape[-1], len(out), activation is not None
    at_once = 2 if is_gated else 1  # linears that one program multiplies
    rows, missing = x.numel() // inputs, MOST_LINEARS - len(linears)
    weights, biases = zip(*linears, *[linears[0]] * missing, strict=True)  # the kernel is always given three
    has_bias = biases[0] is not None
    counts = [len(weight) for weight, _ in linears] + [0] * missing
    tiling = _tiling(outputs, parts, rows, linears=at_once)
    tiles = sum(triton.cdiv(count, tiling.outputs) for count in (counts[:1] if is_gated else counts))
    part_inputs = triton.cdiv(triton.cdiv(inputs, PART_UNIT), parts) * PART_UNIT
    _product[(tiles, triton.cdiv(rows, tiling.rows), parts)](
        x.contiguous(), *weights, *(biases if has_bias else weights), out, rows, outputs, *counts, inputs, part_inputs,
        ROWS=tiling.rows, OUT=tiling.outputs, IN=tiling.inputs, BIAS=has_bias, EVEN=inputs % tiling.inputs == 0,
        GATED=is_gated, GELU=0 if activation is None else IS_GELU[activation],
        num_warps=tiling.warps, num_stages=_stages(tiling, parts, x.device, linears=at_once),
    )  # fmt: skip


def _tiling(outputs: int, parts: int, rows: int, *, linears: int) -> Tiling:
    """Return how programs, each of which works on so many linears at once, divide `rows` and `outputs`.

    The order of a row's sums depends on the kind of matrix instruction. Tiles of 64 and of 128 outputs have the same
    kind, tiles of 32 have another: so whether a weight has tiles of 32 must not depend on the rows.
    """
    some = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(rows)))
    if parts == 1 and outputs < ENOUGH_OUTPUTS:
        return Tiling(some, outputs=32, inputs=128, warps=2)
    if parts > 1 or linears > 1 or rows <= 64:
        return Tiling(some, outputs=64, inputs=128 // linears, warps=4)
    return Tiling(min(2 * MOST_ROWS, triton.next_power_of_2(rows)), outputs=128, inputs=64, warps=8)


def _stages(tiling: Tiling, parts: int, device: torch.device, *, linears: int) -> int:
    """Return how many reads a program has under way: 2 to `MOST_STAGES`, as far as shared memory holds them."""
    nbytes = 2 * tiling.inputs * (tiling.outputs * linears + tiling.rows)  # of one read
    alone = tiling.warps == 8 or parts > 1  # on a processor: a large program, or one of few
    return max(2, min(MOST_STAGES, shared_bytes(device) // (1 if alone else 2) // nbytes))


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return LEAST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED))


def check(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Run the kernel once in each of its forms."""
    x, linear = torch.ones(2, 640, dtype=dtype, device=device), (torch.ones(64, 640, dtype=dtype, device=device), None)
    product(x, [linear, linear])
    product_in_parts(x, linear)
    gated_product(x, linear, linear, activation)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class KernelLayer(TensorLayer):
    """The same layer, on the same weights; its rows' keys and values go to `FixedSlots`.

    Args:
        next_norm: first norm of the next layer, which the last kernel of this one computes; None for none.
    """

    def __init__(self, layer: TensorLayer, next_norm: Norm | None) -> None:
        vars(self).update(vars(layer))
        self._next_norm = next_norm

    def enter(self, x: Tensor, angles: Angles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `TensorLayer.enter`; keys and values are a band of all slots."""
        kv, groups, dim = self.parts.heads
        slots, norm = angles.cache, self.parts.norms[0]
        normed = _norm(norm, x) if slots.normed is None else slots.normed
        outputs = _outputs(self._qkv, normed, slots.by_torch)
        widths = [kv * groups * dim, kv * dim, kv * dim]
        query, key, value = outputs if len(outputs) == 3 else outputs[0].split(widths, -1)
        if self.parts.head_norms is not None:
            query_norm, key_norm = self.parts.head_norms
            query = _norm(query_norm, query if self.parts.wide else query.unflatten(-1, (-1, dim))).flatten(2)
            key = _norm(key_norm, key if self.parts.wide else key.unflatten(-1, (-1, dim))).flatten(2)
        rotation = angles.cosine, angles.sine, angles.rotation.partner
        query = rotate_and_store(query, key, value, *rotation, slots.slots, slots.starts, slots.stores(index), groups)
        return query, *slots.band(index)

    def leave(self, x: Tensor, mixed: Tensor, angles: Angles) -> Tensor:
        """See `TensorLayer.leave`; the attention's result may also be [B, n, kv * groups * dim]."""
        slots = angles.cache
        behind_attention, behind_mlp = self.parts.behind
        before_mlp = self.parts.norms[1]
        if mixed.dim() == 4:
            mixed = self.parts.heads.side_by_side(mixed)
        more = _output_in_parts(self._output, mixed, behind_attention, slots.by_torch)
        x, entering = _add_norm(x, more, before_mlp)
        more = _output_in_parts(self._down, self._gated(entering, slots.by_torch), behind_mlp, slots.by_torch)
        x, slots.normed = _add_norm(x, more, self._next_norm)
        return x

    def _gated(self, x: Tensor, by_torch: bool) -> Tensor:
        """Return the input of the MLP's last linear: the activation of the gate, times the other half."""
        linears = _linears(self._gate_up, x, by_torch)
        if linears is None:
            outputs = self._gate_up.outputs(x)
            gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
            return gated(gate, up, self.parts.activation)
        if len(linears) == 1:
            weight, bias = linears[0]
            biases = (None, None) if bias is None else bias.chunk(2)
            linears = list(zip(weight.chunk(2), biases, strict=True))
        gate_linear, up_linear = linears
        return gated_product(x, gate_linear, up_linear, self.parts.activation)


class KernelHead(TensorHead):
    """The same head, by the kernels."""

    def __init__(self, head: TensorHead) -> None:
        vars(self).update(vars(head))

    def __call__(self, x: Tensor) -> Tensor:
        (logits,) = _outputs(self._head, _norm(self._norm, x), by_torch=False)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


def _linears(stock: StockProduct, x: Tensor, by_torch: bool) -> list[Linear] | None:
    """Return the linears that `products` multiplies with x; None where torch does.

    They are contiguous, of the type of x, which has 16 bits, and all have a bias or none has.
    """
    linears = stock.linears()
    alike = len({bias is None for _, bias in linears}) == 1
    fit = all(weight.is_contiguous() and weight.dtype == x.dtype for weight, _ in linears)
    return linears if x.dtype != torch.float32 and alike and fit and not by_torch else None


def _outputs(stock: StockProduct, x: Tensor, by_torch: bool) -> list[Tensor]:
    linears = _linears(stock, x, by_torch)
    return stock.outputs(x) if linears is None else [product(x, linears)]


def _output_in_parts(stock: StockProduct, x: Tensor, norm: Norm | None, by_torch: bool) -> Tensor:
    """Return the summands [P, ..., d] that one linear, and a norm behind it, add to the hidden states."""
    linears = _linears(stock, x, by_torch)
    if linears is None or norm is not None:
        return _norm(norm, _outputs(stock, x, by_torch)[0])[None]
    return product_in_parts(x, linears[0])


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    return _add_norm(x, None, norm)[1]


def _add_norm(x: Tensor, more: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Return x + more [P, ..., d], and the norm of that."""
    if norm is None and more is None:
        return x, x
    return add_norm(x, more, None if norm is None else norm.weight, 0.0 if norm is None else norm.epsilon)
