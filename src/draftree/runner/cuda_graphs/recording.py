"""One recorded pass: the layers' angles, masks and slots, made on the device from the pass's inputs.

The numbers are those of `masks` and `kv.cache`. Those may take new shapes with every pass and read values back from the
device. Here nothing is read back, and every shape follows from the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.runner.cuda_graphs.frames import Buffers, Frame, Packed, PassInputs, by_torch
from draftree.runner.eager.runner import Angles, AngleTables, Attention, SegmentRows, TensorHead, TensorLayer, attend
from draftree.runner.kv.cache import finite
from draftree.runner.plan import Segment
from draftree.runner.positions import LayerKind, PassMasks
from draftree.runner.target import Target

BEYOND = 1024  # token positions past a band that its rows may have

Stores = list[tuple[Tensor, Tensor]]  # keys and values of every layer, each [slots, heads, capacity, dim]


class FixedSlots:
    """Stands in for the cache in the layers of one pass: writes at given KV positions, returns a band of them.

    Args:
        starts: LongTensor [B], the KV position at which its rows begin.

    Attributes:
        by_torch: see the function of this name.
        normed: first norm of the next layer's input, which the last kernel of a layer computes; None for none.
    """

    def __init__(self, frame: Frame, slots: Tensor, starts: Tensor, row: Tensor, stores: Stores) -> None:
        self.slots, self.starts = slots, starts
        self.by_torch = by_torch(frame.batch * frame.rows, frame.row_by_row)
        self.normed: Tensor | None = None
        self._stores, self._band = stores, frame.band
        self._places = starts[:, None] + row

    def stores(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each [slots, heads, capacity, dim]."""
        return self._stores[index]

    def band(self, index: int) -> tuple[Tensor, Tensor]:
        """Return their first KV positions, which are read."""
        keys, values = self._stores[index]
        return keys[:, :, : self._band], values[:, :, : self._band]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write rows [B, heads, R, dim]; see `SlotCache.update`."""
        key_states, value_states = finite(key_states), finite(value_states)
        held_keys, held_values = self._stores[layer_idx]
        held_keys[self.slots[:, None], :, self._places] = key_states.transpose(1, 2)
        held_values[self.slots[:, None], :, self._places] = value_states.transpose(1, 2)
        return self.band(layer_idx)


class FixedMasks(PassMasks):
    """Masks of a recorded pass over the positions of its band."""

    def __init__(self, frame: Frame, inputs: PassInputs, kv_positions: Tensor, dtype: torch.dtype) -> None:
        self.frame, self.inputs, self.kv_positions, self.dtype = frame, inputs, kv_positions, dtype
        self.segment = Segment(0, None, inputs.positions, inputs.visible)
        self.lengths = [frame.band - frame.rows]  # as many positions may be seen as the band has
        self._cached: dict[LayerKind, Tensor | None] = {}
        self._plain_row = False

    @cached_property
    def key_positions(self) -> Tensor:
        """Token position at each KV position, LongTensor [B, K]; negative in the deep prefix."""
        row = self.kv_positions - self.inputs.starts[:, None]
        own = self.inputs.positions.gather(1, row.clamp(0, self.frame.rows - 1))
        return torch.where(row >= 0, own, (self.kv_positions - self.frame.prefix).expand_as(row))

    @cached_property
    def seen(self) -> Tensor:
        """Visibility without any window, BoolTensor [B, R, K]."""
        frame, inputs = self.frame, self.inputs
        place = self.kv_positions - inputs.begins[:, None]  # [B, K], index in `visible`
        index = place.clamp(0, frame.covered - 1)[:, None].expand(-1, frame.rows, -1)
        shown = inputs.visible.gather(2, index) & (place < frame.covered)[:, None]
        seen = (place < 0)[:, None] | shown
        if frame.prefix:
            seen = torch.where(self.kv_positions < frame.prefix, inputs.on_prefix[..., None], seen)
        return seen

    @cached_property
    def order(self) -> tuple[Tensor, Tensor]:
        """Each row's KV positions [B, R, K], those of other branches last, and its own place there [B, R]."""
        others = (self.kv_positions >= self.inputs.begins[:, None])[:, None] & ~self.seen
        order = torch.where(others, self.kv_positions + self.frame.band, self.kv_positions).argsort(-1)
        return order, (~others).sum(-1) - 1

    def additive(self, kind: LayerKind) -> Tensor:
        """Return the mask [B, 1, R, K]."""
        mask = super().additive(kind)
        assert mask is not None
        return mask


class FixedRows(SegmentRows):
    """Angles and attention of a recorded pass."""

    def __init__(
        self,
        tables: AngleTables,
        reached: dict[str | None, tuple[Tensor, Tensor]],
        masks: FixedMasks,
        slots: FixedSlots,
        kernel: Callable[..., Tensor] | None,
    ) -> None:
        super().__init__(tables, masks, slots)
        self._frame, self._starts, self._masks, self._slots = masks.frame, masks.inputs.starts, masks, slots
        self._reached, self._kernel = reached, kernel

    def look_up(self, kind: LayerKind) -> Angles:
        """Return the angles in layers of that kind, without reading a position back from the device."""
        name, positions = self.tables.name(kind), self._masks.inputs.positions
        cosine, sine = (F.embedding(positions, table)[:, :, None] for table in self._reached[name])
        return Angles(cosine, sine, self._slots, self.tables.rotation)

    def mix(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """Return the attention of queries [B, kv, groups * R, dim] in such a layer; a kernel's as [B, R, width].

        Keys and values are those of all slots, [slots, kv, K, dim].
        """
        row_by_row, slots = self._frame.row_by_row, self._slots.slots
        if self._kernel is not None and heads.cap is None and not self._slots.by_torch:
            order, starts = self._masks.order if row_by_row else (None, self._starts)
            mask = self._masks.additive(kind)[:, 0]
            return self._kernel(query, keys, values, mask, slots, starts, heads.groups, heads.scaling, order)
        if self._frame.leading and self._frame.batch <= len(keys):  # results of padding are not read
            keys, values = keys[: self._frame.batch], values[: self._frame.batch]
        else:
            keys, values = keys.index_select(0, slots), values.index_select(0, slots)
        if row_by_row and self._frame.rows > 1:
            return self._mix_row_by_row(heads, query, keys, values, kind)
        return heads(query, keys, values, self.mask(kind, heads.groups))

    def _mix_row_by_row(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """Do the same, each row in the arithmetic of a pass of its own: its branch follows the context.

        KV positions of other branches between them would change the order of sums. They go behind, where masks hide
        them.
        """
        (batch, kv, _, dim), groups = query.shape, heads.groups
        rows, band, (order, _) = self._frame.rows, self._frame.band, self._masks.order
        index = order[:, :, None, :, None].expand(-1, -1, kv, -1, dim)
        keys, values = (
            held[:, None].expand(-1, rows, -1, -1, -1).gather(3, index).view(batch * rows, kv, band, dim)
            for held in (keys, values)
        )
        queries = query.view(batch, kv, groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(batch * rows, kv, groups, dim)
        mask = self._masks.additive(kind).gather(3, order[:, None]).view(batch * rows, 1, 1, band)
        mixed = heads(queries, keys, values, mask).view(batch, rows, kv, groups, dim)
        return mixed.permute(0, 2, 3, 1, 4).reshape(batch, kv, groups * rows, dim)


# ---------------------------------------------------------------- recordings


@dataclass(frozen=True)
class Recorded:
    """The modules and settings that passes are recorded from. It does not refer to the runner that owns recordings."""

    target: Target  # the model
    layers: Sequence[TensorLayer]  # its modules as they are run, like the head and the embedding
    head: TensorHead
    embedding: Any
    tables: AngleTables  # its rotary angles
    cap: float | None  # of attention scores; None for none
    kernel: Callable[..., Tensor] | None  # of attention; None for torch's


class Outputs(NamedTuple):
    """Buffers of what a pass returns, and of what enters it."""

    entering: Tensor | None  # [B, R, d], states or embeddings that enter; None where only tokens do
    leaving: Tensor  # [B, R, d], states behind the last layer
    taps: dict[int, Tensor]  # by layer, states [B, R, d] that enter it
    logits: Tensor | None  # [B, H, V], of all rows or of those from `head_start` on; None for none


@dataclass(slots=True)
class Recording:
    """A pass through some layers that is recorded, or will be."""

    # Memory of its inputs. They have to be filled in before recording too, which may do the work: rows without inputs
    # would overwrite the context.
    packed: Packed
    buffers: Outputs  # memory of its outputs
    work: Callable[[], None]  # the function that is recorded; it holds all memory that a replay reads
    replay: Callable[[], None] | None = None  # repeats the work; None before it is recorded
    has_run: bool = False  # whether the work was done without recording it


def recording_of(frame: Frame, model: Recorded, stores: Stores, buffers: Buffers, kv_positions: Tensor) -> Recording:
    """Return what passes of `frame` do, not recorded yet."""
    target, take, dtype = model.target, buffers.take, model.target.dtype
    packed, shape = buffers.packed(frame), (frame.batch, frame.rows, target.hidden_size)
    out = Outputs(
        take("entering", shape, dtype) if frame.injects else None,
        take("leaving", shape, dtype),
        {tap: take(f"tap {tap}", shape, dtype) for tap in frame.taps},
        take("logits", (frame.batch, frame.heads, target.vocab_size), dtype) if frame.heads else None,
    )
    inputs, head_rows = packed.inputs, kv_positions[: frame.heads]
    reached = model.tables.reach(frame.band + BEYOND, dtype, kv_positions.device)

    def enter() -> Tensor:
        if frame.layers[0] > 0:
            assert out.entering is not None
            return out.entering
        x: Tensor = model.embedding(inputs.ids)
        return x if out.entering is None else torch.where(inputs.injected[..., None], out.entering, x)

    def work() -> None:
        slots = FixedSlots(frame, inputs.slots, inputs.starts, kv_positions[: frame.rows], stores)
        band = kv_positions[: frame.band]
        rows = FixedRows(model.tables, reached, FixedMasks(frame, inputs, band, dtype), slots, model.kernel)
        x = enter()
        for number in range(*frame.layers):
            if number in out.taps:
                out.taps[number].copy_(x)
            x = attend(model.layers[number], x, number, rows, target.kinds[number], model.cap)
        out.leaving.copy_(x)
        if out.logits is not None:
            if frame.heads < frame.rows:
                x = x.index_select(1, (inputs.head_start + head_rows).clamp(max=frame.rows - 1))
            out.logits.copy_(model.head(x))

    return Recording(packed, out, work)
