"""The small steps of a layer, one kernel each where torch has several: Triton, which comes with torch for CUDA.

A step of few rows is bound by reading weights, and what lies between two products takes a third of its time in torch's
operations, most of it for the kernels' beginning and end. Each row has the arithmetic of those operations, rounded
where they round, and no row's depends on how many others there are.

Rows of states are contiguous; rows of what a product gave may lie further apart than they are wide.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

SPAN = 512  # columns that one program attends to: always the same ones, so that sums have the same order in all passes
WIDTH = 1024  # of an MLP, by one program
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
TOLERANCE = 0.05  # of results near 1 in 16 bits


@triton.jit
def _add_norm(
    x, more, weight, total, out, epsilon, of_part, D: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """A row: `total` is x + more, which may come in parts; `out` its root-mean-square norm."""
    begin = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    inside = at < D
    value = tl.load(x + begin + at, mask=inside, other=0.0)
    if ADDS > 0:
        other = tl.load(more + begin + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, ADDS):
            other += tl.load(more + part * of_part + begin + at, mask=inside, other=0.0)
        other = other.to(x.dtype.element_ty).to(tl.float32)
        value = (value.to(tl.float32) + other).to(x.dtype.element_ty)
        tl.store(total + begin + at, value, mask=inside)
    if NORMS:
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + epsilon)
        gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + begin + at, (wide * scale * gain).to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, more: Tensor | None, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + more, and its norm.

    Args:
        x: [..., d].
        more: [P, ..., d], parts of what is added; None for nothing.
        weight: of the norm, [d]; None for no norm: x + more itself is in its place.
        epsilon: of the norm.
    """
    x = x.contiguous()
    width = x.shape[-1]
    total = x if more is None else torch.empty_like(x)
    out = total if weight is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    grid = (x.numel() // width,)
    warps = 8 if block > 2048 else 4 if block > 512 else 1
    _add_norm[grid](
        x, x if more is None else more.contiguous(), x if weight is None else weight, total, out, epsilon, x.numel(),
        D=width, BLOCK=block, ADDS=0 if more is None else len(more), NORMS=weight is not None, num_warps=warps,
    )  # fmt: skip
    return total, out


@triton.jit
def _turn_and_keep(
    query, key, value, of_query, of_key, of_value, cosine, sine, partner, starts, out, keys, values, slot, head_of_slot,
    rows, KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query is turned, a key turned and put into its slot, a value put there."""
    row, head = tl.program_id(0), tl.program_id(1)
    b, i = row // rows, row % rows
    QUERIES: tl.constexpr = KV * GROUPS
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    wide = row.to(tl.int64)
    column = tl.load(starts + b) + i
    if head < QUERIES + KV:
        if head < QUERIES:
            source = query + wide * of_query + head * DIM
        else:
            source = key + wide * of_key + (head - QUERIES) * DIM
        held = tl.load(source + at, mask=inside, other=0.0)
        across = tl.load(source + tl.load(partner + at, mask=inside, other=0), mask=inside, other=0.0)
        cos = tl.load(cosine + wide * DIM + at, mask=inside, other=0.0)
        sin = tl.load(sine + wide * DIM + at, mask=inside, other=0.0)
        turned = (held.to(tl.float32) * cos.to(tl.float32)).to(cosine.dtype.element_ty).to(tl.float32)
        turned = (turned + across.to(tl.float32) * sin.to(tl.float32)).to(cosine.dtype.element_ty).to(tl.float32)
        if head < QUERIES:
            to = ((b * QUERIES + head) * rows + i).to(tl.int64) * DIM
            tl.store(out + to + at, turned.to(out.dtype.element_ty), mask=inside)
        else:
            key_held = turned.to(keys.dtype.element_ty)
            key_held = tl.where(tl.abs(key_held.to(tl.float32)) < float("inf"), key_held, 0.0)
            kept = b.to(tl.int64) * slot + (head - QUERIES).to(tl.int64) * head_of_slot + column * DIM
            tl.store(keys + kept + at, key_held.to(keys.dtype.element_ty), mask=inside)
    else:
        number = head - QUERIES - KV
        copied = tl.load(value + wide * of_value + number * DIM + at, mask=inside, other=0.0).to(tl.float32)
        copied = tl.where(tl.abs(copied) < float("inf"), copied, 0.0)
        place = b.to(tl.int64) * slot + number.to(tl.int64) * head_of_slot + column * DIM
        tl.store(values + place + at, copied.to(values.dtype.element_ty), mask=inside)


def turn_and_keep(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    partner: Tensor,
    starts: Tensor,
    stores: tuple[Tensor, Tensor],
    groups: int,
) -> Tensor:
    """Queries [B, kv, groups * n, dim], turned; keys, turned, and values are put behind each slot's context.

    Args:
        query, key, value: [B, n, heads * dim], columns of what products gave.
        cosine, sine: [B, n, 1, dim], see `Angles`.
        partner: LongTensor [dim], which entry each one turns with.
        starts: LongTensor [B], the column of each request's first row.
        stores: keys and values of the layer, each [B, kv, capacity, dim].
        groups: query heads to a key/value head.
    """
    batch, n, _ = query.shape
    keys, values = stores
    kv, dim = keys.shape[1], keys.shape[3]
    out = query.new_empty(batch, kv, groups * n, dim)
    _turn_and_keep[(batch * n, kv * (groups + 2))](
        query, key, value, query.stride(1), key.stride(1), value.stride(1), cosine, sine, partner, starts, out,
        keys, values, keys.stride(0), keys.stride(1),
        n, KV=kv, GROUPS=groups, DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def opened(x, GELU: tl.constexpr):
    """The activation of numbers in float32."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 * tl.sigmoid(2.0 * inner))  # 1 + tanh(inner)
    else:
        return x * tl.sigmoid(x)


@triton.jit
def _gated(gate, up, of_gate, of_up, out, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(gate + row * of_gate + at, mask=inside, other=0.0).to(tl.float32)
    x = opened(x, GELU).to(out.dtype.element_ty).to(tl.float32)
    x = x * tl.load(up + row * of_up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, x.to(out.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of gate times up, both [B, n, w], columns of what products gave."""
    batch, n, width = gate.shape
    out = gate.new_empty(batch, n, width)
    _gated[(batch * n, triton.cdiv(width, WIDTH))](
        gate, up, gate.stride(1), up.stride(1), out, N=width, BLOCK=WIDTH, GELU=ACTIVATIONS[activation]
    )
    return out


@triton.jit
def _attend(
    query, keys, values, mask, starts, out, parts, logs, slot, head_of_slot, scale, rows, band, spans,
    KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, OF_SPAN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Some queries of one key/value head over one span of columns; the whole of it where there is one span."""
    pair, span = tl.program_id(0), tl.program_id(2)
    b, head = pair // KV, pair % KV
    number = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)  # of the head's queries: by group, then by row
    real = number < GROUPS * rows
    row = (b * rows + number % rows).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    mine = (pair * GROUPS * rows + number).to(tl.int64)
    q = tl.load(query + mine[:, None] * DIM + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    store = b.to(tl.int64) * slot + head.to(tl.int64) * head_of_slot
    last = tl.minimum(tl.load(starts + b).to(tl.int32) + rows, band)
    last = tl.minimum(last, span * OF_SPAN + OF_SPAN)
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK], tl.float32)
    for begin in range(span * OF_SPAN, last, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        there = column < last
        k = tl.load(
            keys + store + column[None, :] * DIM + at[:, None], mask=there[None, :] & inside[:, None], other=0.0
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        seen = tl.load(mask + row[:, None] * band + column[None, :], mask=real[:, None] & there[None, :], other=0.0).to(
            tl.float32
        )
        score = tl.where(there[None, :], score + seen, float("-inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        share = tl.exp(score - highest[:, None])
        fading = tl.exp(most - highest)
        weight = weight * fading + tl.sum(share, 1)
        v = tl.load(
            values + store + column[:, None] * DIM + at[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        mixed = mixed * fading[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        most = highest
    if WHOLE:
        place = row * (KV * GROUPS * DIM) + (head * GROUPS + number // rows) * DIM
        done = (mixed / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] + at[None, :], done, mask=real[:, None] & inside[None, :])
    else:
        part = mine * spans + span
        tl.store(parts + part[:, None] * DIM + at[None, :], mixed, mask=real[:, None] & inside[None, :])
        tl.store(logs + part * 2, most, mask=real)
        tl.store(logs + part * 2 + 1, weight, mask=real)


@triton.jit
def _join(
    parts, logs, out, rows, spans,
    KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MOST_SPANS: tl.constexpr,
):  # fmt: skip
    """One query of one head: its spans, each weighed by what it holds of the softmax."""
    mine = tl.program_id(0).to(tl.int64)
    pair, number = mine // (GROUPS * rows), mine % (GROUPS * rows)
    b, head = pair // KV, pair % KV
    span = tl.arange(0, MOST_SPANS)
    real = span < spans
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    most = tl.load(logs + (mine * spans + span) * 2, mask=real, other=float("-inf"))
    weight = tl.load(logs + (mine * spans + span) * 2 + 1, mask=real, other=0.0)
    share = tl.exp(most - tl.max(most, 0))
    mixed = tl.load(
        parts + (mine * spans + span)[:, None] * DIM + at[None, :], mask=real[:, None] & inside[None, :], other=0.0
    )
    done = tl.sum(mixed * share[:, None], 0) / tl.sum(weight * share, 0)
    place = (b * rows + number % rows) * (KV * GROUPS * DIM) + (head * GROUPS + number // rows) * DIM
    tl.store(out + place + at, done.to(out.dtype.element_ty), mask=inside)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, starts: Tensor, groups: int, scaling: float
) -> Tensor:
    """The attention of queries [B, kv, groups * n, dim], as [B, n, kv * groups * dim].

    Args:
        query: of the rows.
        keys, values: [B, kv, K, dim], the columns that there may be to see; those behind a request's rows are not read.
            Columns of a head lie one behind the other in memory.
        mask: [B, n, K], what is added to the scores.
        starts: LongTensor [B], the column of each request's first row.
        groups: query heads to a key/value head.
        scaling: of the scores.
    """
    batch, kv, count, dim = query.shape
    n, band = count // groups, keys.shape[2]
    query, mask = query.contiguous(), mask.contiguous()
    spans = triton.cdiv(band, SPAN)
    out = query.new_empty(batch, n, kv * groups * dim)
    whole = spans == 1
    parts = out if whole else torch.empty(batch * kv * count, spans, dim, dtype=torch.float32, device=query.device)
    logs = out if whole else torch.empty(batch * kv * count, spans, 2, dtype=torch.float32, device=query.device)
    queries = min(64, max(16, triton.next_power_of_2(count)))
    block = max(16, triton.next_power_of_2(dim))
    sizes: dict[str, Any] = {"KV": kv, "GROUPS": groups, "DIM": dim, "BLOCK": block}
    # What fits into the 99 KB of shared memory that the smallest of these devices have.
    columns, stages = (64, 3) if block * query.element_size() <= 256 else (32, 2)
    if query.dtype == torch.float32:
        columns, stages, queries = 16, 1, min(queries, 32)
    _attend[(batch * kv, triton.cdiv(count, queries), spans)](
        query, keys, values, mask, starts, out, parts, logs, keys.stride(0), keys.stride(1), scaling, n, band, spans,
        **sizes, QUERIES=queries, COLUMNS=columns, OF_SPAN=SPAN, WHOLE=whole, num_warps=4, num_stages=stages,
    )  # fmt: skip
    if not whole:
        _join[(batch * kv * count,)](
            parts, logs, out, n, spans, **sizes, MOST_SPANS=triton.next_power_of_2(spans), num_warps=1
        )
    return out


def check(kv: int, groups: int, dim: int, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Run every kernel as a model's layers will, on a few numbers, and compare attention with torch's.

    Raises:
        Exception: whatever Triton raises where it cannot compile or run one.
        RuntimeError: attention is not what torch's is.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    add_norm(random(1, 2, 64), random(1, 1, 2, 64), random(64), 1e-6)
    gated(random(1, 2, 64), random(1, 2, 64), activation)
    for n, capacity in ((1, SPAN // 2), (max(1, 64 // groups), 2 * SPAN)):
        starts = torch.tensor([capacity - n], dtype=torch.long, device=device)
        keys, values = random(1, kv, capacity, dim), random(1, kv, capacity, dim)
        heads = random(1, n, kv * groups * dim), random(1, n, kv * dim), random(1, n, kv * dim)
        angles = random(1, n, 1, dim), random(1, n, 1, dim)
        partner = torch.arange(dim, dtype=torch.long, device=device)
        query = turn_and_keep(*heads, *angles, partner, starts, (keys, values), groups)
        mask = torch.zeros(1, n, capacity, dtype=dtype, device=device)
        ours = attend(query, keys, values, mask, starts, groups, dim**-0.5).view(n, kv, groups, dim).float()
        theirs = F.scaled_dot_product_attention(query.float(), keys.float(), values.float(), scale=dim**-0.5)
        off = (ours - theirs.view(kv, groups, n, dim).permute(2, 0, 1, 3)).abs().max()
        if not float(off) < TOLERANCE:
            raise RuntimeError(f"attention is off by {float(off):.2g}")
