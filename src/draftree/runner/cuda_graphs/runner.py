"""Llama-shaped models at fixed shapes: the passes of `eager`, recorded once and replayed.

A step of few rows is some hundred small kernels, and Python launches them more slowly than a GPU runs them. A recorded
pass is launched whole. Rows enter through the buffers of `frames`, keys and values are written in place into the slots,
and attention reads a band of KV positions under a mask made on the device. Rows that join or leave in mid-stack do so
between two recordings. Passes of other shapes run as in `eager`.

On a CPU, where recordings gain nothing, a replay calls the function again, so that all of this can be tested there.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from draftree.runner.base import note_preparation
from draftree.runner.cuda_graphs.frames import (
    BUCKETS,
    MOST_COVERED,
    MOST_EXACT,
    MOST_IN_ALL,
    MOST_ROWS,
    Buffers,
    Frame,
    band_of,
    batch_of,
    bucket_of,
    by_torch,
    capture_for,
)
from draftree.runner.cuda_graphs.recording import Outputs, Recorded, Recording, recording_of
from draftree.runner.eager.parts import Parts
from draftree.runner.eager.runner import EagerRunner
from draftree.runner.kv.cache import BLOCK, SlotCache, Stores
from draftree.runner.plan import PassResult, Plan, Segment, logit_slice, operate
from draftree.runner.positions import is_length_dependent
from draftree.runner.target import Target

log = logging.getLogger("draftree.runner")
OLDEST = (8, 0)  # CUDA capability that Triton's kernels have all types for
TYPES = (torch.float32, torch.bfloat16, torch.float16)
KEPT = 128  # recordings of a cache


def has_kernels(parts: Parts, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device runs the kernels of this folder for such layers: each is tried on a few numbers."""
    if device.type != "cuda" or dtype not in TYPES or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        from draftree.runner.cuda_graphs import kernels, products

        with torch.cuda.device(device):
            kernels.check(parts.heads.kv, parts.heads.groups, parts.heads.dim, parts.activation, dtype, device)
            if dtype != torch.float32:
                products.check(parts.activation, dtype, device)
    except Exception as why:  # no C compiler, a folder that cannot be written, too little shared memory, ...
        reason = (str(why).strip().splitlines() or [type(why).__name__])[0]
        log.warning("draftree's Triton kernels do not run here, so that steps take longer: %s", reason)
        return False
    return True


class CudaGraphRunner(EagerRunner):
    """Drives models of the families in `eager.parts`; see `Runner`."""

    name = "cuda_graphs"

    @classmethod
    def refusal(cls, target: Target) -> str | None:
        reason = super().refusal(target)
        if reason is None and is_length_dependent(target.decoder.rotary_emb):
            reason = (
                "Passes of fixed shapes are impossible for rotary embeddings that depend on a text's length "
                f"('{target.decoder.rotary_emb.rope_type}'): leave out runner='cuda_graphs'."
            )
        return reason

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        layers, head, kernel = self._layers, self._head, None
        if has_kernels(layers[0].parts, target.dtype, target.device):
            from draftree.runner.cuda_graphs.kernels import attend
            from draftree.runner.cuda_graphs.products import KernelHead, KernelLayer

            next_norms = [*(layer.parts.norms[0] for layer in layers[1:]), None]
            layers = [KernelLayer(*pair) for pair in zip(layers, next_norms, strict=True)]
            head, kernel = KernelHead(head), attend
        # Capped scores are multiplied by torch, over a band that is wider or narrower in other passes; and so are all
        # products on a GPU without the kernels.
        self.independent_rows = self._cap is None and (kernel is not None or target.device.type == "cpu")
        self._model = Recorded(target, layers, head, self._embedding, self.tables, self._cap, kernel)
        self._capture = capture_for(target.device)
        self._buffers = Buffers(self._capture, target.device)
        self._kv_positions = torch.arange(0, device=target.device)
        self._free_stores: deque[Stores] = deque(maxlen=1)  # of the last cache that was dropped
        self._replaying = threading.RLock()
        self.recorded = 0

    @property
    def plan_device(self) -> torch.device:
        return torch.device("cpu")

    def new_cache(
        self, slots: int, capacity: int = BLOCK, prefix: list[tuple[Tensor, Tensor]] | None = None
    ) -> SlotCache:
        """See `Runner.new_cache`.

        Every call of `generate` has a cache of its own, and recordings read the memory of the cache they were made
        with. So the stores of the last cache serve the next one of its size, recordings included.
        """
        cache = super().new_cache(slots, capacity, prefix)
        with suppress(IndexError):
            cache.take_over(self._free_stores.popleft())  # freed where they do not fit
        if prefix is None:
            weakref.finalize(cache, _keep, self._free_stores, cache.all_stores).atexit = False
        return cache

    # ---------------------------------------------------------------- a pass

    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        if self.takes(plan, cache, first):
            with self._replaying:
                return self._run_recorded(plan, cache, first)
        if plan.row_by_row and self.target.dtype != torch.float32:  # other products and bands than in recorded passes
            raise ValueError(
                f"strict=True cannot be kept in passes of more than {BUCKETS[-1]} rows: draft fewer tokens a step."
            )
        return super().run(plan, cache, first)

    def takes(self, plan: Plan, cache: SlotCache, first: int) -> bool:
        """Return whether such passes are recorded: not of too many rows."""
        rows = plan.width + plan.appended
        bucket = bucket_of(rows)
        if bucket is None:
            return False
        band = cache.prefix_length + max(cache.lengths[first : first + plan.batch]) + bucket
        return (
            (plan.row_by_row or (bucket <= MOST_ROWS and plan.batch * bucket <= MOST_IN_ALL))
            and (band <= MOST_EXACT or not by_torch(plan.batch * bucket, plan.row_by_row))
            and rows + plan.visible.shape[2] - plan.width <= MOST_COVERED
        )

    def _run_recorded(self, plan: Plan, cache: SlotCache, first: int) -> PassResult:
        """Replay the pass, in runs of layers between surgeries. The tensors returned are copies of the buffers."""
        most = bucket_of(plan.width + plan.appended)
        assert most is not None
        cache.open(first, plan.batch, most)
        surgeries = {s.layer: s for s in plan.surgeries}
        segment = Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)
        segments, hidden = [segment], {}
        count = len(self._layers)
        stops = sorted({*surgeries, count})
        made: Outputs | None = None
        x: Tensor | None = None
        last = 0
        for start, stop in zip([0, *stops], stops, strict=False):
            if x is not None:
                segment, x = operate(segment, surgeries[start], x, plan.width)
                segments.append(segment)
                if start in plan.taps:
                    hidden[start] = x.clone()
            n = segment.positions.shape[1]
            if stop == count:
                stop_row = logit_slice(plan, segment).stop
                last = n if stop_row is None else min(stop_row, n)
            made = self._replay(plan, segment, cache, (start, stop), x, last)
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
        return PassResult(logits, segments, hidden, self)

    def _replay(
        self, plan: Plan, segment: Segment, cache: SlotCache, layers: tuple[int, int], x: Tensor | None, last: int
    ) -> Outputs:
        """Run layers [start, stop) on the segment's rows, which are tokens, or states x [B, n, d] from before.

        `last` is the row behind the last one that gets logits, 0 where none does.
        """
        own = plan.embeddings if x is None else x
        frame = self._frame(plan, segment, cache, layers, last, injects=own is not None)
        recording = self._recording(frame, cache)
        real, n, _ = segment.visible.shape
        injected = 0 if own is None else own.shape[1]
        tokens, head_start = plan.tokens if x is None else None, plan.first_logit_row if last else 0
        self._buffers.fill(recording.packed, segment, cache.first, cache.starts, tokens, injected, head_start)
        if own is not None:
            assert recording.buffers.entering is not None
            recording.buffers.entering[:real, n - injected : n].copy_(own)
        self._do(recording)
        return recording.buffers

    def _frame(
        self, plan: Plan, segment: Segment, cache: SlotCache, layers: tuple[int, int], last: int, *, injects: bool
    ) -> Frame:
        """Return the shape in which layers [start, stop) run on the segment's rows; see `_replay`."""
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
        kernel_attends = self._model.kernel is not None and self._cap is None and not joint
        covered = rows
        while covered < rows + wide - n:
            covered *= 2
        heads = bucket_of(last - plan.first_logit_row) if last else 0
        assert heads is not None
        return Frame(
            batch=batch,
            rows=rows,
            band=band_of(end, cache.capacity, exact=joint),
            covered=covered,
            prefix=cache.prefix_length,
            layers=layers,
            taps=tuple(sorted(tap for tap in set(plan.taps) if layers[0] < tap < layers[1] or tap == layers[0] == 0)),
            injects=injects,
            heads=heads,
            row_by_row=plan.row_by_row,
            leading=cache.first == 0 and not kernel_attends,
        )

    # ---------------------------------------------------------------- recordings

    def _recording(self, frame: Frame, cache: SlotCache) -> Recording:
        """Return the recording of a frame and cache. The least recently used one is dropped beyond `KEPT`."""
        held = cache.recordings
        if frame not in held:
            like = torch.empty(0, dtype=self.target.dtype, device=self.target.device)
            heads = [layer.parts.heads for layer in self._layers]
            stores = [cache.stores(i, of.kv, (of.dim, of.dim), like) for i, of in enumerate(heads)]
            if len(self._kv_positions) < frame.band:  # earlier recordings keep the tensor they were made with
                self._kv_positions = torch.arange(frame.band, device=self.target.device)
            held[frame] = recording_of(frame, self._model, stores, self._buffers, self._kv_positions)
        held.move_to_end(frame)
        while len(held) > KEPT:
            held.popitem(last=False)
        found: Recording = held[frame]
        return found

    def _do(self, recording: Recording) -> None:
        """Replay a recording. Where recording is costly, the first pass of a frame runs without it."""
        if recording.replay is None:
            if self._capture.costly:
                note_preparation()
                if not recording.has_run:
                    recording.has_run = True
                    self._capture.once(recording.work)
                    return
            recording.replay = self._capture.record(recording.work)
            self.recorded += 1
        recording.replay()


def _keep(free: deque[Stores], stores: Stores) -> None:
    """Keep the stores of a cache that is dropped, if they were ever made."""
    if all(store is not None for store in (*stores.keys, *stores.values)):
        free.append(stores)
