"""A whole pass in one compiled call: embedding, layers, norm and head, where nothing is to be done in between.

Most steps are such: a tree's rows go in, its logits come out. For a model of a few million parameters the calls that a
pass is otherwise put together from take a fifth of its time (`_one_call.h`).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from draftree.host.ahead import Runner, Scratch
from draftree.host.cache import SlotCache
from draftree.host.compiled import LANES, WORTH_THREADS, CompiledHead, CompiledStack, _Pass
from draftree.host.plan import Plan

MOST = 256  # rows; more take their time in the layers, and memory that is kept for the next pass


class _Whole(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "keys", "values")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("embedding", "norm", "cosines", "sines", "head")),
        *((name, c_int64) for name in ("vocabulary", "positions")),
        ("epsilon", c_float),
    )


class OneCall:
    """Runs plain passes through all layers of a stack; see `Runner` for the arguments."""

    def __init__(self, library: ctypes.CDLL, stack: CompiledStack, head: CompiledHead, embedding: Tensor) -> None:
        self._call = library.layer_pass
        self._call.restype = c_int64
        self._call.argtypes = [POINTER(_Whole), POINTER(_Pass), c_void_p, c_void_p, c_int64, *[c_void_p] * 4]
        self._stack, self._head, self._embedding, self._scratch = stack, head, embedding, Scratch()
        self._hidden = embedding.shape[1]

    @classmethod
    def beside(cls, runner: Runner) -> OneCall:
        """Of the same stack as a runner's, which has the same wants."""
        return cls(runner._library, runner._stack, runner._head, runner._embedding)

    @staticmethod
    def takes(plan: Plan) -> bool:
        """Whether nothing is to be done within the pass, and it is small enough for the time of calls to matter."""
        rows = plan.batch * plan.width if plan.sizes is None else sum(plan.sizes)
        all_wanted = not plan.first_logit_row and (plan.last_logit_row or plan.width) == plan.width
        return rows <= MOST and all_wanted and plan.plain

    def run(self, plan: Plan, cache: SlotCache, tables: tuple[Tensor, Tensor]) -> Tensor | None:
        """Logits [B, N, V] of all real rows; None where a token or a position is beyond the tables.

        Args:
            plan: nothing but tokens, positions and who sees whom. Rows beyond its `sizes` are left out.
            cache: open for it.
            tables: cosines and sines by position.
        """
        batch, n = plan.tokens.shape
        rows, dim, starts = batch * n, self._stack.dim, cache.starts
        counts = offsets = None
        if plan.sizes is not None and min(plan.sizes) < n:
            counts, offsets = (c_int64 * batch)(*plan.sizes), (c_int64 * (batch + 1))(0, *accumulate(plan.sizes))
            rows = offsets[batch]
        threads = self._stack.threads(rows)
        tokens, positions, visible = plan.tokens.contiguous(), plan.positions.contiguous(), plan.visible.contiguous()
        matrix = self._head._packed.described
        logits = torch.empty(batch, n, matrix.outputs)
        scratch, scores = rows * self._stack.scratch, threads * (2 * dim + max(starts) + n) * LANES
        spare = 0 if counts is None else rows * matrix.outputs
        at = self._scratch.floats(rows * (2 * dim + 2 * self._hidden) + scratch + scores + spare)
        cosine, sine, x = at, at + 4 * rows * dim, at + 8 * rows * dim
        normed = x + 4 * rows * self._hidden
        more = normed + 4 * rows * self._hidden
        p = _Pass(
            *(batch, n, cache.first, cache.capacity, (c_int64 * batch)(*starts)),
            *(cosine, sine, more, threads, cache.prefix_length, visible.shape[2] - n),
            *(visible.data_ptr(), None, more + 4 * scratch),
            *(None if part is None else ctypes.addressof(part) for part in (counts, offsets)),
        )
        at_head = torch.get_num_threads() if rows * matrix.inputs * matrix.outputs > WORTH_THREADS // 4 else 1
        whole = self._whole(cache, tables)
        spared = more + 4 * (scratch + scores)
        rows_at = tokens.data_ptr(), positions.data_ptr()
        done = self._call(whole, p, *rows_at, at_head, x, normed, spared, logits.data_ptr())
        return logits if done else None

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
            *(part.data_ptr() for part in (like, weight, *tables)),
            *(ctypes.addressof(self._head._packed.described), len(like), len(tables[0]), epsilon),
        )
        cache.notes[self] = tables[0], whole, (keys, values)
        return whole
