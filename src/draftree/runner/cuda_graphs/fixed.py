"""What the layers of a recorded pass share: angles, masks and slots, made on the device from the pass's inputs.

The same numbers as those of `layout.masks` and `kv.cache`, which may take new shapes with every pass and read values
back from the device; here nothing is read back, and no shape depends on anything but the frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.runner.cuda_graphs.frames import Frame, PassInputs, by_torch
from draftree.runner.eager.attention import Attention
from draftree.runner.eager.layer import Angles
from draftree.runner.eager.parts import Norm
from draftree.runner.kv.cache import finite
from draftree.runner.masks import LayerKind, limits
from draftree.runner.positions import Rotation

GATHERED = 16  # rows whose own keys and values are gathered at a time, as they take memory


class FixedSlots:
    """Stands in for the cache in the layers: writes at the columns given, returns a band of columns.

    Args:
        frame: the pass's shape.
        slots: LongTensor [B], each request's slot.
        starts: LongTensor [B], the column at which its rows begin.
        stores: keys and values of every layer, each [slots, heads, capacity, dim].

    Attributes:
        by_torch: see the function of this name.
    """

    def __init__(self, frame: Frame, slots: Tensor, starts: Tensor, stores: list[tuple[Tensor, Tensor]]) -> None:
        self.slots, self.starts = slots, starts
        self.by_torch = by_torch(frame.batch * frame.rows, frame.row_by_row)
        self._normed: tuple[Tensor, Norm | None, Tensor] | None = None
        self._stores = stores
        self._band = frame.band
        self._row = torch.arange(frame.rows, device=starts.device)
        self._column = starts[:, None] + self._row

    def begin(self) -> None:
        """A pass begins: its rows are written from `starts` on."""
        self._column, self._normed = self.starts[:, None] + self._row, None

    def end(self) -> None:
        """A pass ends: its recording is not to keep what the last layer left for a next one."""
        self._normed = None

    def keep_normed(self, x: Tensor, norm: Norm | None, normed: Tensor) -> None:
        """Keep the norm of the states x that leave a layer, which was computed along with them, for the next layer."""
        self._normed = x, norm, normed

    def normed(self, x: Tensor, norm: Norm | None) -> Tensor | None:
        """The norm of x, if it is what was kept last; None if not."""
        if self._normed is None:
            return None
        kept_x, kept_norm, normed = self._normed
        return normed if kept_x is x and kept_norm is norm else None

    def stores(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [slots, heads, capacity, dim]."""
        return self._stores[index]

    def band(self, index: int) -> tuple[Tensor, Tensor]:
        """Their first columns, which are read."""
        keys, values = self._stores[index]
        return keys[:, :, : self._band], values[:, :, : self._band]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """As `SlotCache.update`, of rows [B, heads, R, dim]."""
        key_states, value_states = finite(key_states), finite(value_states)
        held_keys, held_values = self._stores[layer_idx]
        held_keys[self.slots[:, None], :, self._column] = key_states.transpose(1, 2)
        held_values[self.slots[:, None], :, self._column] = value_states.transpose(1, 2)
        return self.band(layer_idx)


class FixedRows:
    """Angles and masks of a recorded pass; see `eager.attention.Rows`.

    Args:
        frame: the pass's shape.
        inputs: its inputs.
        columns: LongTensor [K], 0, 1, ...
        slots: where keys and values go.
        tables: of angles, see `AngleTables.reach`.
        rotation: which entries turn with which.
        dtype: of the model.
        kernel: `kernels.attend`; None for torch's attention.
    """

    def __init__(
        self,
        frame: Frame,
        inputs: PassInputs,
        columns: Tensor,
        slots: FixedSlots,
        tables: dict[str | None, tuple[Tensor, Tensor]],
        rotation: Rotation,
        dtype: torch.dtype,
        kernel: Callable[..., Tensor] | None,
    ) -> None:
        self._kernel = kernel
        self._frame, self._inputs, self._columns = frame, inputs, columns
        self._slots, self._turning, self._dtype = slots, (tables, rotation), dtype
        slots.begin()
        self._angles: dict[str | None, Angles] = {}
        self._masks: dict[LayerKind, Tensor] = {}
        self._folded: dict[tuple[LayerKind, int], Tensor] = {}
        self._seen: Tensor | None = None
        self._ordered: tuple[Tensor, Tensor] | None = None

    def angles(self, kind: LayerKind) -> Any:
        """The angles in layers of that kind."""
        tables, rotation = self._turning
        name = None if None in tables else kind.name
        if name not in self._angles:
            cosine, sine = (F.embedding(self._inputs.positions, table)[:, :, None] for table in tables[name])
            self._angles[name] = Angles(cosine, sine, self._slots, rotation)
        return self._angles[name]

    def mix(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """The attention of queries [B, kv, groups * R, dim] in a layer of that kind; a kernel's as [B, R, width].

        Keys and values are those of all slots, [slots, kv, K, dim].
        """
        row_by_row, slots = self._frame.row_by_row, self._slots.slots
        if self._kernel is not None and heads.cap is None and not self._slots.by_torch:
            order, starts = self._order() if row_by_row else (None, self._inputs.starts)
            mask = self._additive(kind)[:, 0]
            return self._kernel(query, keys, values, mask, slots, starts, heads.groups, heads.scaling, order)
        if self._frame.leading and self._frame.batch <= len(keys):  # what pads reads anything, and nobody reads that
            keys, values = keys[: self._frame.batch], values[: self._frame.batch]
        else:
            keys, values = keys.index_select(0, slots), values.index_select(0, slots)
        if row_by_row and self._frame.rows > 1:
            return self._mix_row_by_row(heads, query, keys, values, kind)
        return heads(query, keys, values, self.mask(kind, heads.groups))

    def _mix_row_by_row(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """The same, each row in the arithmetic of a pass of its own: its branch's columns follow the context.

        Other branches' columns between them would change the order of sums. They go behind, where masks hide them.
        """
        batch, kv, _, dim = query.shape
        rows, band = self._frame.rows, self._frame.band
        (order, _), mask = self._order(), self._additive(kind)
        mask = mask.gather(3, order[:, None])
        query = query.view(batch, kv, heads.groups, rows, dim)
        mixed = torch.empty_like(query)
        for first in range(0, rows, GATHERED):
            some = slice(first, min(first + GATHERED, rows))
            n = some.stop - some.start
            index = order[:, some, None, :, None].expand(-1, -1, kv, -1, dim)
            key, value = (
                held[:, None].expand(-1, n, -1, -1, -1).gather(3, index).view(batch * n, kv, band, dim)
                for held in (keys, values)
            )
            queries = query[:, :, :, some].permute(0, 3, 1, 2, 4).reshape(batch * n, kv, heads.groups, dim)
            masks = mask[:, :, some].transpose(1, 2).reshape(batch * n, 1, band)
            part = heads(queries, key, value, masks[:, None])
            mixed[:, :, :, some] = part.view(batch, n, kv, heads.groups, dim).permute(0, 2, 3, 1, 4)
        return mixed.view(batch, kv, heads.groups * rows, dim)

    def _order(self) -> tuple[Tensor, Tensor]:
        """Each row's columns [B, R, K], those of other branches behind all others, and its own place there [B, R]."""
        if self._ordered is None:
            others = (self._columns >= self._inputs.begins[:, None])[:, None] & ~self.seen
            order = torch.where(others, self._columns + self._frame.band, self._columns).argsort(-1)
            self._ordered = order, (~others).sum(-1) - 1
        return self._ordered

    def mask(self, kind: LayerKind, groups: int) -> Tensor:
        """The additive mask repeated for every query head of a group: [B, 1, groups * R, K]."""
        key = kind, groups
        if key not in self._folded:
            mask = self._additive(kind)
            self._folded[key] = mask.repeat(1, 1, groups, 1) if groups > 1 and mask.shape[2] > 1 else mask
        return self._folded[key]

    def _additive(self, kind: LayerKind) -> Tensor:
        """[B, 1, R, K]; layers that nothing is cut off from share one."""
        if not limits(kind, self._frame.band):
            kind = LayerKind()
        if kind not in self._masks:
            seen = self.seen
            if kind.window is not None or kind.chunk is not None:
                seen = seen & self._near(kind)
            low = torch.finfo(self._dtype).min
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, low)
            self._masks[kind] = mask[:, None]
        return self._masks[kind]

    @property
    def seen(self) -> Tensor:
        """BoolTensor [B, R, K]: visibility without any window."""
        if self._seen is None:
            frame, inputs = self._frame, self._inputs
            place = self._columns - inputs.begins[:, None]  # [B, K], a column's index in `visible`
            index = place.clamp(0, frame.covered - 1)[:, None].expand(-1, frame.rows, -1)
            shown = inputs.visible.gather(2, index) & (place < frame.covered)[:, None]
            seen = (place < 0)[:, None] | shown
            if frame.prefix:
                seen = torch.where(self._columns < frame.prefix, inputs.on_prefix[..., None], seen)
            self._seen = seen
        return self._seen

    def _near(self, kind: LayerKind) -> Tensor:
        """BoolTensor [B, R, K]: what window or chunk let through; a deep prefix is never cut."""
        frame, inputs = self._frame, self._inputs
        row = self._columns - inputs.starts[:, None]
        own = inputs.positions.gather(1, row.clamp(0, frame.rows - 1))
        context = (self._columns - frame.prefix).expand_as(row)
        key = torch.where(row >= 0, own, context)[:, None]
        query = inputs.positions[..., None]
        near = torch.ones_like(self.seen)
        if kind.window is not None:
            near = (query - key) < kind.window
        if kind.chunk is not None:
            near = near & (query // kind.chunk == key // kind.chunk)
        return near | (key < 0)
