"""A whole pass in one compiled call: embedding, layers, norm and head, and the rows that drafters attach on the way.

Most steps are such: a tree's rows go in, masks behind them perhaps, pseudo states may join in mid-stack, and logits
come out. For a model of a few million parameters the calls that a pass is otherwise put together from take a fifth of
its time, and twice that where rows join (`_one_call.h`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftree.native import address, optional_address
from draftree.runner.cpu.ahead import ChainRunner, Scratch
from draftree.runner.cpu.layers import LANES, CompiledHead, CompiledStack, _Pass
from draftree.runner.cpu.packed import Matrix, to_panels
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Plan, Projection, Segment, Surgery

MOST = 256  # rows; more take their time in the layers, and memory that is kept for the next pass
KEPT = 16  # matrices of projections that are remembered in panels


class _Whole(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "keys", "values")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("embedding", "norm", "cosines", "sines", "head")),
        *((name, c_int64) for name in ("vocabulary", "positions")),
        ("epsilon", c_float),
    )


class _Join(Structure):
    _fields_ = (
        ("layer", c_int64),
        ("matrix", c_void_p),
        *((name, c_int64) for name in ("steps", "sources")),
        *((name, c_void_p) for name in ("source", "visible")),
    )


class _Entry(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "positions", "embeddings")),
        *((name, c_int64) for name in ("given", "last", "wanted", "joins", "head_threads")),
        ("join", c_void_p),
    )


class Brought(NamedTuple):
    """What a pass brought.

    Attributes:
        logits: [B, n, V], of the plan's first rows up to its `last_logit_row`.
        hidden: [B, N, d], the last layer's output for all rows that were there in the end; None unless tapped.
        segments: row layouts, one per run of layers.
    """

    logits: Tensor
    hidden: Tensor | None
    segments: list[Segment]


class OneCall:
    """Runs passes through all layers of a stack; see `ChainRunner` for the arguments."""

    def __init__(self, library: ctypes.CDLL, stack: CompiledStack, head: CompiledHead, embedding: Tensor) -> None:
        self._call = library.layer_pass
        self._call.restype = c_int64
        self._call.argtypes = [POINTER(_Whole), POINTER(_Pass), POINTER(_Entry), *[c_void_p] * 5]
        self._stack, self._head, self._embedding, self._scratch = stack, head, embedding, Scratch()
        self._hidden = embedding.shape[1]
        self._matrices: dict[int, tuple[Tensor, Tensor, Matrix]] = {}  # by id: of a projection, and in panels

    @classmethod
    def beside(cls, chain: ChainRunner) -> OneCall:
        """Of the same stack as a chain's, which has the same wants."""
        return cls(chain._library, chain._stack, chain._head, chain._embedding)

    def takes(self, plan: Plan) -> bool:
        """Whether the pass holds nothing that this cannot do, and is small enough for the time of calls to matter."""
        if plan.first_logit_row or plan.row_by_row or plan.skip is not None or plan.leaves is not None:
            return False
        n = plan.width
        if plan.sizes is not None and not plan.plain:
            return False
        if plan.surgeries:
            if plan.prefix_rows is not None or plan.visible.shape[2] > n or not all(map(_simple, plan.surgeries)):
                return False
            n += sum(_count(s) for s in plan.surgeries)
        elif plan.embeddings is None and (plan.last_logit_row or n) != n:
            return False
        if plan.taps and plan.taps != (len(self._stack.numbers),):
            return False
        return (plan.batch * n if plan.sizes is None else sum(plan.sizes)) <= MOST

    @staticmethod
    def rows(plan: Plan) -> int:
        """Rows of a request when all have joined."""
        return plan.width + sum(_count(s) for s in plan.surgeries)

    def run(self, plan: Plan, cache: SlotCache, tables: tuple[Tensor, Tensor]) -> Brought | None:
        """The pass; None where a token or a position is beyond the tables.

        Args:
            plan: one that this `takes`. Rows beyond its `sizes` are left out.
            cache: open for it.
            tables: cosines and sines by position.
        """
        batch, n = plan.tokens.shape
        surgeries, embeddings = plan.surgeries, plan.embeddings
        last, positions = n, plan.positions
        segments = [Segment(0, None, positions, plan.visible, plan.prefix_rows)]
        for s in surgeries:
            assert s.positions is not None
            assert s.joined is not None
            last += s.positions.shape[1]
            positions = torch.cat([positions, s.positions], 1)
            segments.append(Segment(s.layer, None, positions, s.joined))
        wanted = min(plan.last_logit_row or n, n)
        rows, dim, starts = batch * last, self._stack.dim, cache.starts
        counts = offsets = None
        if plan.sizes is not None and min(plan.sizes) < n:
            counts, offsets = (c_int64 * batch)(*plan.sizes), (c_int64 * (batch + 1))(0, *accumulate(plan.sizes))
            rows = offsets[batch]
        threads, at_head = self._stack.threads(rows), self._head.threads(rows)
        tokens, positions, visible = plan.tokens.contiguous(), positions.contiguous(), plan.visible.contiguous()
        prefix_rows = None if plan.prefix_rows is None else plan.prefix_rows.contiguous()
        if embeddings is not None:
            embeddings = embeddings.to(self._embedding.dtype).contiguous()
        matrix = self._head._packed.described
        logits = torch.empty(batch, wanted, matrix.outputs, dtype=torch.float32, device="cpu")
        hidden = torch.empty(batch, last, self._hidden, dtype=torch.float32, device="cpu") if plan.taps else None
        joins, kept, made = self._joins(surgeries, batch)
        scratch, scores = rows * self._stack.scratch, threads * (2 * dim + max(starts) + last) * LANES
        spare = 0 if counts is None else rows * matrix.outputs
        at = self._scratch.floats(rows * (2 * dim + 2 * self._hidden) + scratch + scores + spare + made)
        cosine, sine, x = at, at + 4 * rows * dim, at + 8 * rows * dim
        normed = x + 4 * rows * self._hidden
        more = normed + 4 * rows * self._hidden
        spared = more + 4 * (scratch + scores)
        p = _Pass(
            *(batch, n, cache.first, cache.capacity, (c_int64 * batch)(*starts)),
            *(cosine, sine, more, threads, cache.prefix_length, visible.shape[2] - n),
            *(address(visible, torch.bool), optional_address(prefix_rows, torch.bool), more + 4 * scratch),
            *(None if part is None else ctypes.addressof(part) for part in (counts, offsets)),
        )
        entry = _Entry(
            *(address(tokens, torch.long), address(positions, torch.long), optional_address(embeddings, torch.float32)),
            *(0 if embeddings is None else embeddings.shape[1], last, wanted, len(surgeries)),
            at_head,
            None if joins is None else ctypes.addressof(joins),
        )
        whole = self._whole(cache, tables)
        states, to = optional_address(hidden, torch.float32) or x, address(logits, torch.float32)
        began = self._stack.pace.clock()
        done = self._call(whole, p, entry, states, normed, spared, spared + 4 * spare, to)
        del kept  # what C read of the joins lived until here
        if not done:
            return None
        self._stack.pace.took(rows * self._stack.weights, max(threads, at_head), began)
        return Brought(logits, hidden, segments)

    def _joins(self, surgeries: Sequence[Surgery], batch: int) -> tuple[ctypes.Array[_Join] | None, list[Any], int]:
        """What C reads of the rows that join, what else it points to, and the floats that making the rows takes."""
        if not surgeries:
            return None, [], 0
        joins, kept, made = (_Join * len(surgeries))(), [], 0
        for join, s in zip(joins, surgeries, strict=True):
            assert isinstance(s.append, Projection)
            assert s.joined is not None
            found = self._in_panels(s.append.matrix)
            matrix = found[2]
            given, steps = s.append.given, matrix.outputs // self._hidden
            source = None if s.source is None else s.source.contiguous()
            visible = s.joined.contiguous()
            kept += [visible, source, found]
            join.layer, join.matrix, join.steps, join.sources = s.layer, ctypes.addressof(matrix), steps, given
            join.source, join.visible = optional_address(source, torch.long), address(visible, torch.bool)
            made = max(made, batch * given * (1 + steps) * self._hidden)
        return joins, kept, made

    def _in_panels(self, matrix: Tensor) -> tuple[Tensor, Tensor, Matrix]:
        """The matrix, its panels and what C reads of them, all to be kept as long as C may read."""
        found = self._matrices.get(id(matrix))
        if found is None:
            if len(self._matrices) >= KEPT:
                self._matrices.clear()
            panels = to_panels(matrix.T.to(self._embedding.dtype))
            described = Matrix(address(panels, torch.float32), None, *matrix.shape)
            # The matrix is kept along, so that its id is not given to another one.
            found = self._matrices[id(matrix)] = matrix, panels, described
        return found

    def _whole(self, cache: SlotCache, tables: tuple[Tensor, Tensor]) -> _Whole:
        """What passes over the same cache share."""
        known = cache.notes.get(self)
        if known is not None and known[0] is tables[0]:
            found: _Whole = known[1]
            return found
        like = self._embedding
        keys, values = self._stack.stores(cache, like)
        weight, epsilon = self._head._norm
        whole = _Whole(
            *(ctypes.addressof(part) for part in (self._stack._described, keys, values)),
            len(keys),
            *(address(part, torch.float32) for part in (like, weight, *tables)),
            *(ctypes.addressof(self._head._packed.described), len(like), len(tables[0]), epsilon),
        )
        cache.notes[self] = tables[0], whole, (keys, values)
        return whole


def _simple(surgery: Surgery) -> bool:
    """Whether all that it does is to let rows join that a matrix makes of others."""
    source = surgery.source
    return (
        isinstance(surgery.append, Projection)
        and (source is None or source.shape[1] == surgery.append.given)
        and surgery.joined is not None
        and surgery.keep is None
        and surgery.resolve is None
        and surgery.numbers is None
        and not surgery.hide_prefix
    )


def _count(surgery: Surgery) -> int:
    return 0 if surgery.positions is None else surgery.positions.shape[1]
