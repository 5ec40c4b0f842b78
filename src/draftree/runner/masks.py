"""Attention masks of a pass: who sees whom, per kind of layer, as additive floats.

Windows and chunks limit *token positions*, not KV positions: tree siblings share a token position, and slots of a batch
end at different KV positions. Every attention implementation accepts additive float masks, and on a CPU they are a
tenth faster than boolean ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Segment

# Rows may have later token positions than their number says (rows of a drafter, of which earlier ones were pruned). A
# window this close to the end of the context is applied, which is never wrong.
MARGIN = 64


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How far a layer looks."""

    name: str = "full_attention"  # Hugging Face's name (`full_attention`, `sliding_attention`, `chunked_attention`)
    window: int | None = None  # positions seen back, the row's own included; None for no limit
    chunk: int | None = None  # chunk length in positions; None for no limit


def limits(kind: LayerKind, length: int) -> bool:
    """Return whether a window or chunk of `kind` may cut something off of so many KV positions."""
    return any(limit is not None and limit <= length + MARGIN for limit in (kind.window, kind.chunk))


def near(kind: LayerKind, query: Tensor, key: Tensor) -> Tensor:
    """Return whether window and chunk let token positions `query` see `key`; a deep prefix (-1) is always seen."""
    distance = query - key
    let = torch.ones_like(distance, dtype=torch.bool) if kind.window is None else distance < kind.window
    if kind.chunk is not None:
        let = let & (query // kind.chunk == key // kind.chunk)
    return let | (key < 0)


class PassMasks:
    """Masks of one segment for every layer kind, built once each.

    Args:
        segment: the rows.
        cache: open for the pass.
        first: slot of the first request.
        dtype: of additive masks.
        plain_row: whether a row that sees everything may have no mask.
    """

    def __init__(
        self, segment: Segment, cache: SlotCache, first: int, dtype: torch.dtype, *, plain_row: bool = False
    ) -> None:
        self.segment = segment
        self.prefix = cache.shown_prefix
        self.lengths = cache.lengths[first : first + segment.positions.shape[0]]
        self.dtype = dtype
        self._cached: dict[LayerKind, Tensor | None] = {}
        self._plain_row = plain_row

    @property
    def ragged(self) -> bool:
        """Whether the slots of the pass have different lengths."""
        return min(self.lengths) != max(self.lengths)

    @cached_property
    def key_positions(self) -> Tensor:
        """Token position at each KV position, LongTensor [B, K]; -1 in the deep prefix."""
        positions, longest = self.segment.positions, max(self.lengths)
        batch, rows = positions.shape
        context = torch.arange(longest + rows, device=positions.device).expand(batch, -1).clone()
        if self.ragged:
            start = torch.tensor(self.lengths, device=positions.device, dtype=torch.long)[:, None]
            context.scatter_(1, start + torch.arange(rows, device=positions.device), positions)
        else:
            context[:, longest:] = positions
        return torch.nn.functional.pad(context, (self.prefix, 0), value=-1)

    @cached_property
    def seen(self) -> Tensor:
        """Visibility without any window, BoolTensor [B, n, K]."""
        visible, longest = self.segment.visible, max(self.lengths)
        (batch, rows, covered), device = visible.shape, visible.device
        seen = torch.ones(batch, rows, longest + rows, dtype=torch.bool, device=device)
        if self.ragged:
            start = torch.tensor(self.lengths, device=device, dtype=torch.long)[:, None, None]
            seen &= torch.arange(longest + rows, device=device) < start
            place = (start + torch.arange(rows - covered, rows, device=device)).expand(batch, rows, covered)
            seen.scatter_(2, place.clamp(min=0), visible)
        else:
            seen[:, :, max(longest + rows - covered, 0) :] = visible[:, :, -(longest + rows) :]
        if not self.prefix:
            return seen
        on = self.segment.prefix_rows
        on = torch.zeros(batch, rows, dtype=torch.bool, device=device) if on is None else on
        return torch.cat([on[:, :, None].expand(-1, -1, self.prefix), seen], 2)

    def boolean(self, kind: LayerKind) -> Tensor:
        """Return who sees which KV position in layers of `kind`, BoolTensor [B, n, K]."""
        if kind.window is None and kind.chunk is None:
            return self.seen
        return self.seen & near(kind, self.segment.positions[:, :, None], self.key_positions[:, None, :])

    def additive(self, kind: LayerKind) -> Tensor | None:
        """Return [B, 1, n, K] of 0 and the dtype's minimum; None where one row may go unmasked."""
        kind = kind if self.limited(kind) else LayerKind()  # kinds that cut nothing off share a mask
        if kind not in self._cached:
            self._cached[kind] = self._additive(kind)
        return self._cached[kind]

    def limited(self, kind: LayerKind) -> bool:
        """Return whether a window or chunk of `kind` may cut something off in this pass."""
        return limits(kind, max(self.lengths) + self.segment.positions.shape[1])

    def _additive(self, kind: LayerKind) -> Tensor | None:
        alone = self._plain_row and self.segment.visible.shape[1:] == (1, 1) and not self.ragged
        if alone and not self.prefix and not self.limited(kind):
            return None
        seen = self.boolean(kind)
        low = torch.finfo(self.dtype).min
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, low)
        return mask[:, None]
