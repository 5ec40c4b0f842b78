"""Attention masks of a pass: who sees whom, per kind of layer, as additive floats.

Windows and chunks are limits on *positions*, never on columns: tree siblings share a position, and slots of a
batch end at different columns. Additive float masks are what every attention implementation accepts, and on
CPU they beat boolean ones by a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Segment

# Rows may stand further on than they are many (rows of a drafter whose forerunners were pruned); a window this close to
# the context's end is applied, which is never wrong.
MARGIN = 64


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How far a layer looks.

    Attributes:
        name: Hugging Face's name (`full_attention`, `sliding_attention`, `chunked_attention`).
        window: positions seen back, the row's own included; None for no limit.
        chunk: chunk length in positions; None for no limit.
    """

    name: str = "full_attention"
    window: int | None = None
    chunk: int | None = None


def limits(kind: LayerKind, columns: int) -> bool:
    """Whether a window or chunk of `kind` may cut something off of so many columns."""
    return any(limit is not None and limit <= columns + MARGIN for limit in (kind.window, kind.chunk))


class PassMasks:
    """Masks of one segment for every layer kind, built once each."""

    def __init__(
        self, segment: Segment, cache: SlotCache, first: int, dtype: torch.dtype, *, plain_row: bool = False
    ) -> None:
        self.segment = segment
        self.prefix = cache.shown_prefix
        self.lengths = cache.lengths[first : first + segment.positions.shape[0]]
        self.dtype = dtype
        self._cached: dict[LayerKind, Tensor | None] = {}
        self._key_positions: Tensor | None = None
        self._seen: Tensor | None = None
        self._plain_row = plain_row

    @property
    def ragged(self) -> bool:
        """Whether the slots of the pass have different lengths."""
        return min(self.lengths) != max(self.lengths)

    @property
    def key_positions(self) -> Tensor:
        """LongTensor [B, K]: the position behind each cache column (deep prefix columns: -1)."""
        if self._key_positions is None:
            positions = self.segment.positions
            batch, rows = positions.shape
            longest = max(self.lengths)
            context = torch.arange(longest + rows, device=positions.device).expand(batch, -1).clone()
            if self.ragged:
                start = torch.tensor(self.lengths, device=positions.device, dtype=torch.long)[:, None]
                context.scatter_(1, start + torch.arange(rows, device=positions.device), positions)
            else:
                context[:, longest:] = positions
            self._key_positions = torch.nn.functional.pad(context, (self.prefix, 0), value=-1)
        return self._key_positions

    @property
    def seen(self) -> Tensor:
        """BoolTensor [B, n, K]: visibility without any window."""
        if self._seen is None:
            visible = self.segment.visible
            batch, rows, covered = visible.shape
            device = visible.device
            longest = max(self.lengths)
            seen = torch.ones(batch, rows, longest + rows, dtype=torch.bool, device=device)
            if self.ragged:
                start = torch.tensor(self.lengths, device=device, dtype=torch.long)[:, None, None]
                columns = torch.arange(longest + rows, device=device)
                seen &= columns < start
                place = (start + torch.arange(rows - covered, rows, device=device)).expand(batch, rows, covered)
                seen.scatter_(2, place.clamp(min=0), visible)
            else:
                seen[:, :, max(longest + rows - covered, 0) :] = visible[:, :, -(longest + rows) :]
            if self.prefix:
                on = self.segment.prefix_rows
                head = (
                    torch.zeros(batch, rows, self.prefix, dtype=torch.bool, device=device)
                    if on is None
                    else on[:, :, None].expand(-1, -1, self.prefix)
                )
                seen = torch.cat([head, seen], 2)
            self._seen = seen
        return self._seen

    def boolean(self, kind: LayerKind) -> Tensor:
        """BoolTensor [B, n, K] for layers of `kind`; deep prefix columns are never cut by a window."""
        seen = self.seen
        if kind.window is None and kind.chunk is None:
            return seen
        query, key = self.segment.positions[:, :, None], self.key_positions[:, None, :]
        near = torch.ones_like(seen)
        if kind.window is not None:
            near = (query - key) < kind.window
        if kind.chunk is not None:
            near = near & (query // kind.chunk == key // kind.chunk)
        return seen & (near | (key < 0))

    def additive(self, kind: LayerKind) -> Tensor | None:
        """[B, 1, n, K] of 0 and the dtype's minimum; None where one row may go unmasked."""
        if kind not in self._cached:
            self._cached[kind] = self._additive(kind)
        return self._cached[kind]

    def limited(self, kind: LayerKind) -> bool:
        """Whether a window or chunk of `kind` may cut something off in this pass."""
        return limits(kind, max(self.lengths) + self.segment.positions.shape[1])

    def _additive(self, kind: LayerKind) -> Tensor | None:
        whole = not self.limited(kind) and not self.ragged and not self.prefix
        if whole and self._plain_row and self.segment.visible.shape[1:] == (1, 1):
            return None
        seen = self.boolean(kind)
        low = torch.finfo(self.dtype).min
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, low)
        return mask[:, None]
