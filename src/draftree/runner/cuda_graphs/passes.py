"""Passes at fixed shapes, recorded once and replayed, which keeps a GPU busy.

A step of few rows is some hundred small kernels, and Python launches them more slowly than the device runs them. A
recorded pass is launched whole. Rows go in through the buffers of `frames`; keys and values are written in place into
the slots; attention reads a band of columns under a mask made on the device from the pass's inputs. Rows that join
or leave in mid-stack do so between two recordings.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftree.runner.base import note_preparation
from draftree.runner.cuda_graphs.capture import Capture
from draftree.runner.cuda_graphs.fixed import FixedRows, FixedSlots
from draftree.runner.cuda_graphs.frames import (
    MOST_COVERED,
    MOST_EXACT,
    MOST_IN_ALL,
    MOST_ROWS,
    Buffers,
    Frame,
    PassInputs,
    band_of,
    batch_of,
    bucket_of,
    by_torch,
)
from draftree.runner.eager.angles import AngleTables
from draftree.runner.eager.attention import attend
from draftree.runner.eager.layer import TensorHead, TensorLayer
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.pool import StorePool
from draftree.runner.plan import PassResult, Plan, Scorer, Segment
from draftree.runner.surgery import logit_slice, operate
from draftree.runner.target import Target

KEPT = 128  # recordings for all caches together
BEYOND = 1024  # positions behind a band that its rows may stand at


@dataclass(slots=True)
class Recording:
    """A pass through some layers that is recorded, or will be when it is run.

    Attributes:
        work: the function that is recorded; it holds all memory that a replay reads.
        packed: its inputs, as one tensor.
        inputs: the same by name.
        entering: [B, R, d], states or embeddings that enter; None where only tokens do.
        leaving: [B, R, d], states behind the last layer.
        taps: by layer, states [B, R, d] that enter it.
        logits: [B, H, V], of all rows or of those from `head_start` on; None for none.
        replay: does the work again; None before it is recorded. Inputs have to be filled in before recording as well,
            which may do the work: rows without inputs would be written over the context.
        has_run: whether the work was done without recording it.
    """

    work: Callable[[], None]
    packed: Tensor
    inputs: PassInputs
    entering: Tensor | None
    leaving: Tensor
    taps: dict[int, Tensor]
    logits: Tensor | None
    replay: Callable[[], None] | None = None
    has_run: bool = False


class _Recordings(dict[Frame, Recording]):
    """The recordings of one cache; a class of its own, since plain dicts cannot be referred to weakly."""


class Recorded(NamedTuple):
    """What passes are recorded from.

    Attributes:
        target: the model.
        layers, head, embedding: its modules as they are run.
        tables: its rotary angles.
        watched: parameters by name, of the stock modules whose weights recordings read where the model has them.
        cap: of attention scores; None where they are not bent.
        kernel: of attention; None for torch's.
    """

    target: Target
    layers: Sequence[TensorLayer]
    head: TensorHead
    embedding: Any
    tables: AngleTables
    watched: Sequence[dict[str, nn.Parameter | None]]
    cap: float | None
    kernel: Callable[..., Tensor] | None = None


class CapturedPasses:
    """Runs passes by recordings, as far as they fit one.

    Args:
        recorded: what is recorded.
        capture: makes recordings.
    """

    def __init__(self, recorded: Recorded, capture: Capture) -> None:
        self._model, self._capture = recorded, capture
        self._buffers = Buffers(capture, recorded.target.device)
        # By cache and frame, what was used last at the end. Recordings belong to caches and go when their memory does.
        self._used: OrderedDict[tuple[int, Frame], weakref.ref[_Recordings]] = OrderedDict()
        self._recorded_of: list[Any] = []
        self._key = object()  # of these recordings among a cache's notes: not `self`, which keeps caches' stores
        self._columns = torch.arange(0, device=recorded.target.device)
        self._lock = threading.RLock()
        self.pool = StorePool()
        self.recorded = 0  # recordings made so far

    def takes(self, plan: Plan, cache: SlotCache, first: int) -> bool:
        """Whether such passes are recorded: not of too many rows."""
        rows = plan.width + plan.appended
        bucket = bucket_of(rows)
        if bucket is None:
            return False
        columns = cache.prefix_length + max(cache.lengths[first : first + plan.batch]) + bucket
        return (
            (plan.row_by_row or (bucket <= MOST_ROWS and plan.batch * bucket <= MOST_IN_ALL))
            and (columns <= MOST_EXACT or not by_torch(plan.batch * bucket, plan.row_by_row))
            and rows + plan.visible.shape[2] - plan.width <= MOST_COVERED
        )

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes on the device: of shared buffers, of the recordings themselves, and of stores kept for later caches."""
        return {
            "buffers": self._buffers.nbytes,
            "recordings": self._capture.nbytes,
            "kept stores": self.pool.nbytes,
        }

    def keep_order(self) -> None:
        """See `Capture.keep_order`."""
        with self._lock:
            self._capture.keep_order()

    # ---------------------------------------------------------------- a pass

    def run(self, plan: Plan, cache: SlotCache, first: int, scorer: Scorer) -> PassResult:
        """As `Runner.run` of `scorer`, of a plan that `takes` took. What comes out is the caller's own."""
        with self._lock:
            return self._run(plan, cache, first, scorer)

    def _run(self, plan: Plan, cache: SlotCache, first: int, scorer: Scorer) -> PassResult:
        self._forget_outdated()
        self._capture.keep_order()
        most = bucket_of(plan.width + plan.appended)
        assert most is not None
        cache.open(first, plan.batch, most)
        surgeries = {s.layer: s for s in plan.surgeries}
        segment = Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)
        segments, hidden = [segment], {}
        x: Tensor | None = None
        count = len(self._model.layers)
        stops = sorted({*surgeries, count} - {0})
        made, last = None, 0
        for start, stop in zip([0, *stops], stops, strict=False):
            if start in surgeries:
                assert x is not None
                segment, x = operate(segment, surgeries[start], x, plan.width)
                segments.append(segment)
            if start in plan.taps and start > 0:
                assert x is not None
                hidden[start] = x.clone()
            n = segment.positions.shape[1]
            if stop == count:
                stop_row = logit_slice(plan, segment).stop
                last = n if stop_row is None else min(stop_row, n)
            made = self._replay(plan, segment, cache, first, (start, stop), x, last)
            for layer, state in made.taps.items():
                hidden[layer] = state[: plan.batch, :n].clone()
            x = made.leaving[: plan.batch, :n]
            if stop < count:
                x = x.clone()  # surgeries work on it while the next run of layers writes there
        assert made is not None
        assert x is not None
        assert made.logits is not None
        if count in plan.taps:
            hidden[count] = x.clone()
        own_first = plan.first_logit_row if made.logits.shape[1] == made.leaving.shape[1] else 0
        logits = made.logits[: plan.batch, own_first : own_first + last - plan.first_logit_row].clone()
        return PassResult(logits, segments, hidden, scorer)

    def _replay(
        self,
        plan: Plan,
        segment: Segment,
        cache: SlotCache,
        first: int,
        layers: tuple[int, int],
        x: Tensor | None,
        last: int,
    ) -> Recording:
        """Layers [start, stop) on the segment's rows, which are tokens, or states x [B, n, d] from before."""
        real, n, wide = segment.visible.shape
        rows = bucket_of(n)
        assert rows is not None
        starts, batch = cache.starts, batch_of(real, rows)
        end, end_of_padding = max(starts) + rows, min(starts) + 2 * rows
        if end_of_padding > cache.capacity:
            batch = real
        elif batch > real:
            end = max(end, end_of_padding)
        joint = by_torch(batch * rows, plan.row_by_row)
        kernel_attends = self._model.kernel is not None and self._model.cap is None and not joint
        covered = rows
        while covered < rows + wide - n:
            covered *= 2
        own = plan.embeddings if x is None else x
        heads = bucket_of(last - plan.first_logit_row) if last else 0
        assert heads is not None
        frame = Frame(
            batch,
            rows,
            band_of(end, cache.capacity, exact=joint),
            covered,
            cache.prefix_length,
            layers,
            tuple(sorted(tap for tap in set(plan.taps) if layers[0] < tap < layers[1] or tap == layers[0] == 0)),
            own is not None,
            heads,
            plan.row_by_row,
            leading=first == 0 and not kernel_attends,
        )
        recording = self._recording(frame, cache)
        injected = 0 if own is None else own.shape[1]
        tokens = plan.tokens if x is None else None
        head_start = plan.first_logit_row if last else 0
        self._buffers.fill(recording.packed, recording.inputs, segment, first, starts, tokens, injected, head_start)
        if own is not None:
            assert recording.entering is not None
            recording.entering[:real, n - injected : n].copy_(own)
        if recording.replay is not None:
            recording.replay()
        elif self._capture.costly and not recording.has_run:
            note_preparation()
            self._capture.once(recording.work)
            recording.has_run = True
        else:
            if self._capture.costly:
                note_preparation()
            recording.replay = self._capture.record(recording.work)
            self.recorded += 1
            recording.replay()
        return recording

    # ---------------------------------------------------------------- recordings

    def _recording(self, frame: Frame, cache: SlotCache) -> Recording:
        held: _Recordings | None = cache.notes.get(self._key)
        if held is None:
            self._allocate(cache)  # which forgets notes, so it comes first
            held = cache.notes[self._key] = _Recordings()
        found = held.get(frame)
        if found is None:
            found = held[frame] = self._new_recording(frame, cache)
        self._used[id(held), frame] = weakref.ref(held)
        self._used.move_to_end((id(held), frame))
        while len(self._used) > KEPT:
            self._drop(*self._used.popitem(last=False))
        return found

    @staticmethod
    def _drop(key: tuple[int, Frame], held: weakref.ref[_Recordings]) -> None:
        alive = held()
        if alive is not None:
            alive.pop(key[1], None)

    def _allocate(self, cache: SlotCache) -> None:
        like = self._model.embedding.weight
        for number, layer in enumerate(self._model.layers):
            dim = layer.parts.heads.dim
            cache.stores(number, layer.parts.heads.kv, (dim, dim), like)

    def _new_recording(self, frame: Frame, cache: SlotCache) -> Recording:
        model, take = self._model, self._buffers.take
        dtype, width = model.target.dtype, model.target.hidden_size
        packed, inputs = self._buffers.packed(frame)
        shape = frame.batch, frame.rows, width
        entering = take("entering", shape, dtype) if frame.injects else None
        leaving = take("leaving", shape, dtype)
        taps = {tap: take(f"tap {tap}", shape, dtype) for tap in frame.taps}
        logits = None
        if frame.heads:
            logits = take("logits", (frame.batch, frame.heads, model.target.vocab_size), dtype)
        keys_and_values = []
        for number, layer in enumerate(self._model.layers):
            dim = layer.parts.heads.dim
            keys_and_values.append(cache.stores(number, layer.parts.heads.kv, (dim, dim), leaving))
        if len(self._columns) < frame.band:  # earlier recordings keep what they were made with
            self._columns = torch.arange(frame.band, device=leaving.device)
        columns = self._columns[: frame.band]
        head_rows = torch.arange(frame.heads, device=leaving.device)
        tables = model.tables.reach(frame.band + BEYOND, dtype, leaving.device)
        slots = FixedSlots(frame, inputs.slots, inputs.starts, keys_and_values)

        def run() -> None:
            rows = FixedRows(frame, inputs, columns, slots, tables, model.tables.rotation, dtype, model.kernel)
            if frame.layers[0] == 0:
                x = model.embedding(inputs.ids)
                if entering is not None:
                    x = torch.where(inputs.injected[..., None], entering, x)
            else:
                assert entering is not None
                x = entering
            for number in range(*frame.layers):
                if number in taps:
                    taps[number].copy_(x)
                x = attend(model.layers[number], x, number, rows, model.target.kinds[number], model.cap)
            leaving.copy_(x)
            if logits is not None:
                if frame.heads < frame.rows:
                    x = x.index_select(1, (inputs.head_start + head_rows).clamp(max=frame.rows - 1))
                logits.copy_(model.head(x))
            slots.end()

        return Recording(run, packed, inputs, entering, leaving, taps, logits)

    def _forget_outdated(self) -> None:
        """Drop recordings that read weights which are no longer the model's, or multiply as torch was set before."""
        parameters = (parameter for held in self._model.watched for parameter in held.values())
        now = [_precision(), *(parameter.data_ptr() for parameter in parameters if parameter is not None)]
        if now != self._recorded_of:
            self._recorded_of = now
            while self._used:
                self._drop(*self._used.popitem())


def _precision() -> tuple[str, ...]:
    """How torch multiplies in float32 on CUDA, which a recording keeps."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9, which refuses the older question after a newer setting
        backends: Any = torch.backends
        return matmul.fp32_precision, backends.fp32_precision
    return (torch.get_float32_matmul_precision(),)
