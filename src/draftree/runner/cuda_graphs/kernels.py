"""The operations of a layer between its matrix products, one Triton kernel each where torch has several.

In a step of few rows, which mostly waits for weights to be read, torch's operations between two products take a third
of the time, most of it to start and end kernels. These kernels compute and round as those operations do, and no row
depends on the number of other rows. Triton comes with torch for CUDA.

Rows of hidden states are contiguous; the rows of a product's output may lie further apart than they are wide.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_SPAN, MOST_SPANS = 128, 16  # KV positions that one program attends to, and the number of such spans
SPAN_OF_ROW = 512  # of a row that attends alone: one span for all passes, so that sums have the same order
SPANS_AT_ONCE = 8  # spans added up at a time, likewise
WIDTH = 1024  # columns of an MLP's gate that one program reads
IS_GELU = {"silu": 0, "gelu_pytorch_tanh": 1}  # the activations that there are, by Hugging Face's names


@triton.jit
def _add_norm(
    x, more, weight, total, out, epsilon, part_stride, D: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """Write one row of `total`, which is x + more in ADDS parts, and of `out`, its root-mean-square norm."""
    begin = tl.program_id(0).to(tl.int64) * D
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + begin + column, mask=inside, other=0.0)
    if ADDS > 0:
        added = tl.load(more + begin + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, ADDS):
            added += tl.load(more + part * part_stride + begin + column, mask=inside, other=0.0)
        added = added.to(x.dtype.element_ty).to(tl.float32)
        value = (value.to(tl.float32) + added).to(x.dtype.element_ty)
        tl.store(total + begin + column, value, mask=inside)
    if NORMS:
        state = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(state * state, 0) / D + epsilon)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + begin + column, (state * scale * gain).to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, more: Tensor | None, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x + more, and its norm.

    Args:
        more: [P, ..., d], the parts of a summand; None for none.
        weight: of the norm, [d]; None for no norm, so that x + more is returned twice.
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


@triton.jit(do_not_specialize=["rows"])
def _rotate_and_store(
    query, key, value, query_stride, key_stride, value_stride, cosine, sine, partner, slots, starts, out, keys, values,
    slot_stride, head_stride, rows, KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one query, rotate and store one key, or store one value: one head of one row of all requests."""
    token, head = tl.program_id(0), tl.program_id(1)
    request, row = token // rows, token % rows
    QUERIES: tl.constexpr = KV * GROUPS
    entry = tl.arange(0, BLOCK)
    inside = entry < DIM
    wide_token = token.to(tl.int64)  # whose products do not overflow
    column = tl.load(starts + request) + row
    of_slot = tl.load(slots + request).to(tl.int64) * slot_stride
    if head < QUERIES + KV:
        if head < QUERIES:
            source = query + wide_token * query_stride + head * DIM
        else:
            source = key + wide_token * key_stride + (head - QUERIES) * DIM
        given = tl.load(source + entry, mask=inside, other=0.0)
        partners = tl.load(source + tl.load(partner + entry, mask=inside, other=0), mask=inside, other=0.0)
        cos = tl.load(cosine + wide_token * DIM + entry, mask=inside, other=0.0)
        sin = tl.load(sine + wide_token * DIM + entry, mask=inside, other=0.0)
        rotated = (given.to(tl.float32) * cos.to(tl.float32)).to(cosine.dtype.element_ty).to(tl.float32)
        rotated = (rotated + partners.to(tl.float32) * sin.to(tl.float32)).to(cosine.dtype.element_ty).to(tl.float32)
        if head < QUERIES:
            place = ((request * QUERIES + head) * rows + row).to(tl.int64) * DIM
            tl.store(out + place + entry, rotated.to(out.dtype.element_ty), mask=inside)
        else:
            finite_key = rotated.to(keys.dtype.element_ty)
            finite_key = tl.where(tl.abs(finite_key.to(tl.float32)) < float("inf"), finite_key, 0.0)
            of_key = of_slot + (head - QUERIES).to(tl.int64) * head_stride + column * DIM
            tl.store(keys + of_key + entry, finite_key.to(keys.dtype.element_ty), mask=inside)
    else:
        kv_head = head - QUERIES - KV
        finite_value = tl.load(value + wide_token * value_stride + kv_head * DIM + entry, mask=inside, other=0.0)
        finite_value = finite_value.to(tl.float32)
        finite_value = tl.where(tl.abs(finite_value) < float("inf"), finite_value, 0.0)
        of_value = of_slot + kv_head.to(tl.int64) * head_stride + column * DIM
        tl.store(values + of_value + entry, finite_value.to(values.dtype.element_ty), mask=inside)


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    partner: Tensor,
    slots: Tensor,
    starts: Tensor,
    stores: tuple[Tensor, Tensor],
    groups: int,
) -> Tensor:
    """Rotate queries and keys, and store keys and values behind each slot's context.

    Args:
        query, key, value: [B, n, heads * dim], parts of products' outputs.
        cosine, sine: [B, n, 1, dim], see `Angles`.
        partner: LongTensor [dim], the entry that each entry is rotated with.
        slots: LongTensor [B], each request's slot.
        starts: LongTensor [B], the KV position of each request's first row.
        stores: keys and values of the layer, each [slots, kv, capacity, dim].

    Returns:
        the rotated queries [B, kv, groups * n, dim].
    """
    batch, n, _ = query.shape
    keys, values = stores
    kv, dim = keys.shape[1], keys.shape[3]
    out = query.new_empty(batch, kv, groups * n, dim)
    _rotate_and_store[(batch * n, kv * (groups + 2))](
        query, key, value, query.stride(1), key.stride(1), value.stride(1), cosine, sine, partner, slots, starts, out,
        keys, values, keys.stride(0), keys.stride(1),
        n, KV=kv, GROUPS=groups, DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def activated(x, GELU: tl.constexpr):
    """Return the activation of numbers in float32."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 * tl.sigmoid(2.0 * inner))  # 1 + tanh(inner)
    else:
        return x * tl.sigmoid(x)


@triton.jit
def _gated(gate, up, gate_stride, up_stride, out, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = activated(x, GELU).to(out.dtype.element_ty).to(tl.float32)
    x = x * tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, x.to(out.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return the activation of `gate`, times `up`: both [B, n, w], parts of products' outputs."""
    batch, n, width = gate.shape
    out = gate.new_empty(batch, n, width)
    _gated[(batch * n, triton.cdiv(width, WIDTH))](
        gate, up, gate.stride(1), up.stride(1), out, N=width, BLOCK=WIDTH, GELU=IS_GELU[activation]
    )
    return out


# Not specialised for one row or one span, so that they are compiled alike for a row alone and among others.
@triton.jit(do_not_specialize=["rows", "spans"])
def _attend(
    query, keys, values, mask, slots, starts, order, numerators, softmax, slot_stride, head_stride, scale, rows, band,
    of_span, spans, KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    """Attend with some queries of one key/value head to one span of `of_span` KV positions, by a running softmax.

    Each span leaves its sum of values in `numerators`, its highest score and its sum of exponentials in `softmax`, for
    `_join`. If ONE_ROW, a program has the queries of a single row, and takes KV positions in that row's `order`.
    """
    pair, span = tl.program_id(0), tl.program_id(2)
    request, head = pair // KV, pair % KV
    if ONE_ROW:
        group = tl.program_id(1) // rows * QUERIES + tl.arange(0, QUERIES)
        number, real = group * rows + tl.program_id(1) % rows, group < GROUPS
    else:
        number = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)  # of the head's queries: by group, then by row
        real = number < GROUPS * rows
    row = (request * rows + number % rows).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    inside = entry < DIM
    place = (pair * GROUPS * rows + number).to(tl.int64)
    q = tl.load(query + place[:, None] * DIM + entry[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    store = tl.load(slots + request).to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
    if ONE_ROW:
        own_row = (request * rows + tl.program_id(1) % rows).to(tl.int64)
        end = tl.minimum(tl.load(starts + own_row).to(tl.int32) + 1, band)
    else:
        end = tl.minimum(tl.load(starts + request).to(tl.int32) + rows, band)
    end = tl.minimum(end, span * of_span + of_span)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    denominator = tl.zeros([QUERIES], tl.float32)
    numerator = tl.zeros([QUERIES, BLOCK], tl.float32)
    for begin in range(span * of_span, end, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        there = column < end
        if ONE_ROW:
            column = tl.load(order + own_row * band + column, mask=there, other=0)
        k = tl.load(
            keys + store + column[None, :] * DIM + entry[:, None], mask=there[None, :] & inside[:, None], other=0.0
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        seen = tl.load(mask + row[:, None] * band + column[None, :], mask=real[:, None] & there[None, :], other=0.0).to(
            tl.float32
        )
        score = tl.where(there[None, :], score + seen, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 1))
        exponential = tl.exp(score - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        denominator = denominator * rescale + tl.sum(exponential, 1)
        v = tl.load(
            values + store + column[:, None] * DIM + entry[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        numerator = numerator * rescale[:, None] + tl.dot(exponential.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    to = place * spans + span
    tl.store(numerators + to[:, None] * DIM + entry[None, :], numerator, mask=real[:, None] & inside[None, :])
    tl.store(softmax + to * 2, highest, mask=real)
    tl.store(softmax + to * 2 + 1, denominator, mask=real)


@triton.jit(do_not_specialize=["rows", "spans"])
def _join(
    numerators, softmax, out, rows, spans,
    KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Join the sums of the spans of one query and head, each rescaled to the highest score, to one softmax.

    SOME spans are added at a time, so that further spans, which hold nothing, do not change the order.
    """
    place = tl.program_id(0).to(tl.int64)
    pair, number = place // (GROUPS * rows), place % (GROUPS * rows)
    request, head = pair // KV, pair % KV
    entry = tl.arange(0, BLOCK)
    inside = entry < DIM
    highest_of_all = float("-inf")
    for begin in range(0, spans, SOME):
        span = begin + tl.arange(0, SOME)
        highest = tl.load(softmax + (place * spans + span) * 2, mask=span < spans, other=float("-inf"))
        highest_of_all = tl.maximum(highest_of_all, tl.max(highest, 0))
    numerator = tl.zeros([BLOCK], tl.float32)
    denominator = 0.0
    for begin in range(0, spans, SOME):
        span = begin + tl.arange(0, SOME)
        real = span < spans
        highest = tl.load(softmax + (place * spans + span) * 2, mask=real, other=float("-inf"))
        rescale = tl.exp(highest - highest_of_all)
        exponentials = tl.load(softmax + (place * spans + span) * 2 + 1, mask=real, other=0.0)
        denominator += tl.sum(exponentials * rescale, 0)
        values = tl.load(
            numerators + (place * spans + span)[:, None] * DIM + entry[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        numerator += tl.sum(values * rescale[:, None], 0)
    to = (request * rows + number % rows) * (KV * GROUPS * DIM) + (head * GROUPS + number // rows) * DIM
    tl.store(out + to + entry, (numerator / denominator).to(out.dtype.element_ty), mask=inside)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    slots: Tensor,
    starts: Tensor,
    groups: int,
    scaling: float,
    order: Tensor | None = None,
) -> Tensor:
    """Return the attention of queries [B, kv, groups * n, dim], as [B, n, kv * groups * dim].

    Args:
        keys, values: [slots, kv, K, dim]. KV positions behind a request's rows are not read. The positions of a head
            follow each other in memory.
        mask: [B, n, K], added to the scores.
        slots: LongTensor [B], each request's slot.
        starts: LongTensor [B], the KV position of each request's first row.
        order: LongTensor [B, n, K], for rows that attend as each would in a pass of its own: the KV positions in the
            order of that pass. `starts` is [B, n] then, the row's own place in its order, and nothing behind it is
            read. With an order the result has other last bits than without.
    """
    batch, kv, count, dim = query.shape
    n, band = count // groups, keys.shape[2]
    query, mask = query.contiguous(), mask.contiguous()
    one_row, total = order is not None, batch * kv * count
    of_span = SPAN_OF_ROW if one_row else max(LEAST_SPAN, triton.next_power_of_2(triton.cdiv(band, MOST_SPANS)))
    spans = triton.cdiv(band, of_span)
    out = query.new_empty(batch, n, kv * groups * dim)
    numerators = torch.empty(total, spans, dim, dtype=torch.float32, device=query.device)
    softmax = torch.empty(total, spans, 2, dtype=torch.float32, device=query.device)
    of_one = groups if one_row else count  # queries that may be in one program
    queries = min(64, max(16, triton.next_power_of_2(of_one)))
    block = max(16, triton.next_power_of_2(dim))
    sizes: dict[str, Any] = {"KV": kv, "GROUPS": groups, "DIM": dim, "BLOCK": block}
    # These sizes fit into 99 KB of shared memory, the least that these devices have.
    columns, stages = (64, 3) if block * query.element_size() <= 256 else (32, 2)
    if query.dtype == torch.float32:
        columns, stages, queries = 16, 1, min(queries, 32)
    _attend[(batch * kv, count // of_one * triton.cdiv(of_one, queries), spans)](
        query, keys, values, mask, slots, starts, starts if order is None else order, numerators, softmax,
        keys.stride(0), keys.stride(1), scaling, n, band, of_span, spans, **sizes,
        QUERIES=queries, COLUMNS=columns, ONE_ROW=one_row, num_warps=4, num_stages=stages,
    )  # fmt: skip
    _join[(total,)](numerators, softmax, out, n, spans, **sizes, SOME=SPANS_AT_ONCE, num_warps=1)
    return out


def check(kv: int, groups: int, dim: int, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Run every kernel once, as a model's layers will."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    add_norm(ones(1, 2, 64), ones(1, 1, 2, 64), ones(64), 1e-6)
    gated(ones(1, 2, 64), ones(1, 2, 64), activation)
    slots = torch.zeros(1, dtype=torch.long, device=device)
    for n, capacity in ((1, LEAST_SPAN), (max(1, 64 // groups), 2 * SPAN_OF_ROW)):
        starts = torch.tensor([capacity - n], dtype=torch.long, device=device)
        keys, values = ones(1, kv, capacity, dim), ones(1, kv, capacity, dim)
        heads = ones(1, n, kv * groups * dim), ones(1, n, kv * dim), ones(1, n, kv * dim)
        angles = ones(1, n, 1, dim), ones(1, n, 1, dim)
        partner = torch.arange(dim, dtype=torch.long, device=device)
        query = rotate_and_store(*heads, *angles, partner, slots, starts, (keys, values), groups)
        mask = torch.zeros(1, n, capacity, dtype=dtype, device=device)
        attend(query, keys, values, mask, slots, starts, groups, dim**-0.5)
        order = torch.arange(capacity, dtype=torch.long, device=device).expand(1, n, -1).contiguous()
        last = torch.full((1, n), capacity - 1, dtype=torch.long, device=device)
        attend(query, keys, values, mask, slots, last, groups, dim**-0.5, order)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
