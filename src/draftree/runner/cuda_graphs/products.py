"""Products of a step's rows with weights of 16 bits, in which no row depends on the others: Triton.

A library's product adds in an order that it chooses by the number of rows, so that a row has other last bits among
others than alone, and two tokens that are nearly tied change places. Here each row's sums have one order, whatever
stands beside it: the weights' tiles, and what of the input one program adds, depend on the weights' shape alone.

A step of few rows waits for the weights to be read. They are read once for up to 128 rows, as they lie, and linears
with the same input are one kernel. Where a weight has too few outputs to keep a GPU busy, several programs can share
one tile's input: such sums come in parts, which the next kernel adds up (`kernels.add_norm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from draftree.runner.cuda_graphs.kernels import ACTIVATIONS, TOLERANCE, opened

MOST_LINEARS = 3  # that read the same rows
PROGRAMS = 128  # that keep a GPU busy: the largest have about as many processors
OF_PART = 128  # a part's columns of the input are a multiple
MOST_PARTS = 8
FEW_ROWS, MOST_ROWS = 16, 128  # of one program
LEAST_SHARED = 99 * 1024  # bytes that one program may have on the smallest of these devices

Linear = tuple[Tensor, Tensor | None]  # weight [out, in] and bias [out]


class Tiling(NamedTuple):
    """What one program works on.

    Attributes:
        outputs: of one linear.
        inputs: read at a time.
        warps: of 32 threads.
        stages: reads that are under way.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, w0, w1, w2, b0, b1, b2, out, rows, width, N0, N1, N2, K, of_part,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Some outputs of one linear for some rows, over one part of the input; or those of two, one gated by the other."""
    tile, part = tl.program_id(0), tl.program_id(2)
    w, bias, count, first, mine = w0, b0, N0, 0, tile
    if not GATED:
        of_first = (N0 + OUT - 1) // OUT
        of_second = (N1 + OUT - 1) // OUT
        if tile >= of_first + of_second:
            w, bias, count, first, mine = w2, b2, N2, N0 + N1, tile - of_first - of_second
        elif tile >= of_first:
            w, bias, count, first, mine = w1, b1, N1, N0, tile - of_first
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = mine * OUT + tl.arange(0, OUT)
    at = tl.arange(0, IN)
    real, inside = row < rows, output < count
    given = x + row.to(tl.int64)[None, :] * K + at[:, None]
    place = output.to(tl.int64)[:, None] * K + at[None, :]
    total = tl.zeros([OUT, ROWS], tl.float32)
    second = tl.zeros([OUT, ROWS], tl.float32)
    for begin in range(part * of_part, tl.minimum(K, part * of_part + of_part), IN):
        there, here = inside[:, None], real[None, :]
        if not EVEN:
            left = at < K - begin
            there, here = there & left[None, :], here & left[:, None]
        a = tl.load(w + place + begin, mask=there, other=0.0, eviction_policy="evict_first")
        b = tl.load(given + begin, mask=here, other=0.0)
        total = tl.dot(a, b, total)
        if GATED:
            c = tl.load(w1 + place + begin, mask=there, other=0.0, eviction_policy="evict_first")
            second = tl.dot(c, b, second)
    if BIAS:
        if part == 0:
            total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            second += tl.load(b1 + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = opened(total.to(out.dtype.element_ty).to(tl.float32), GELU).to(out.dtype.element_ty)
        total = gate.to(tl.float32) * second.to(out.dtype.element_ty).to(tl.float32)
    to = (part.to(tl.int64) * rows + row.to(tl.int64))[None, :] * width + first + output[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])


def product(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """The linears' outputs side by side, [..., out].

    Args:
        x: [..., in], of 16 bits.
        linears: up to three with that input, of x's type; all have a bias, or none has.
    """
    out = x.new_empty(*x.shape[:-1], sum(len(weight) for weight, _ in linears))
    _run(x.contiguous(), linears, out[None], None)
    return out


def product_in_parts(x: Tensor, linear: Linear) -> Tensor:
    """A linear's outputs of x [..., in], to be added up: [1, ..., out] of x's type, or float32 [P, ..., out]."""
    outputs, inputs = linear[0].shape
    parts = 1
    while parts < MOST_PARTS and outputs * parts < 64 * PROGRAMS and inputs >= 4 * parts * OF_PART:
        parts *= 2
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty(parts, *x.shape[:-1], outputs, dtype=dtype, device=x.device)
    _run(x.contiguous(), [linear], out, None)
    return out


def gated_product(x: Tensor, gate: Linear, up: Linear, activation: str) -> Tensor:
    """The activation of one linear's outputs, times the other's: [..., out] of x [..., in]."""
    out = x.new_empty(*x.shape[:-1], len(gate[0]))
    _run(x.contiguous(), (gate, up), out[None], activation)
    return out


def _run(x: Tensor, linears: Sequence[Linear], out: Tensor, activation: str | None) -> None:
    """Write the linears' outputs, or what the activation makes of two, to out [P, ..., out]."""
    width, parts, gates = x.shape[-1], len(out), activation is not None
    rows, spare = x.numel() // width, MOST_LINEARS - len(linears)
    counts = [len(weight) for weight, _ in linears] + [0] * spare
    has_bias = linears[0][1] is not None
    weights, biases = [], []
    for weight, bias in (*linears, *[linears[0]] * spare):
        weights.append(weight)
        biases.append(weight if bias is None else bias)
    tiling, block = _tiling(out.shape[-1], parts, rows, x.device, weights=2 if gates else 1)
    tiles = sum(triton.cdiv(count, tiling.outputs) for count in counts[: 1 if gates else MOST_LINEARS])
    of_part = triton.cdiv(triton.cdiv(width, OF_PART), parts) * OF_PART
    _product[(tiles, triton.cdiv(rows, block), parts)](
        x, *weights, *biases, out, rows, out.shape[-1], *counts, width, of_part,
        ROWS=block, OUT=tiling.outputs, IN=tiling.inputs, BIAS=has_bias, EVEN=width % tiling.inputs == 0,
        GATED=gates, GELU=ACTIVATIONS[activation or "silu"], num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


def _tiling(outputs: int, parts: int, rows: int, device: torch.device, *, weights: int) -> tuple[Tiling, int]:
    """How programs divide so many outputs of each of `weights` linears, and rows of one program.

    A row's sums depend on the kind of matrix instruction: 64 outputs and 128 have the same, 32 have another, so those
    are taken whatever the rows.
    """
    block = min(MOST_ROWS, max(FEW_ROWS, triton.next_power_of_2(rows)))
    if parts == 1 and outputs < 64 * PROGRAMS:
        tiling = Tiling(32, 128, 2, 4)
    elif parts > 1 or weights > 1 or rows <= 64:
        tiling = Tiling(64, 128 // weights, 4, 4)
    else:
        tiling, block = Tiling(128, 64, 8, 4), min(2 * MOST_ROWS, triton.next_power_of_2(rows))
    stage = 2 * tiling.inputs * (tiling.outputs * weights + block)  # bytes
    alone = tiling.warps == 8 or parts > 1  # on a processor: a large program, or one of few
    own = shared_bytes(device) // (1 if alone else 2)
    return tiling._replace(stages=max(2, min(tiling.stages, own // stage))), block


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type != "cuda":
        return LEAST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED))


def check(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Run the kernel in its forms on a few numbers, and compare it with torch's product.

    Raises:
        Exception: whatever Triton raises where it cannot compile or run it.
        RuntimeError: a product is not what torch's is.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    x, weight = random(2, 640), random(96, 640) / 25
    expected = x.float() @ weight.float().T
    gate, up = expected.to(dtype).float().chunk(2, -1)
    found = {
        "a product": (product(x, [(weight[:64], None), (weight[64:], None)]), expected),
        "a product in parts": (product_in_parts(x, (weight, None)).float().sum(0), expected),
        "a gated product": (
            gated_product(x, (weight[:48], None), (weight[48:], None), activation),
            (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up,
        ),
    }
    for name, (ours, theirs) in found.items():
        off = float((ours.float() - theirs).abs().max())
        if not off < TOLERANCE:
            raise RuntimeError(f"{name} is off by {off:.2g}")
