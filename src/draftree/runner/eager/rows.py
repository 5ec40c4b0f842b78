"""What all layers of one segment share in a pass of any shape: angles, masks, and how rows attend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftree.runner.eager.angles import AngleTables
from draftree.runner.eager.attention import Attention
from draftree.runner.kv.cache import SlotCache
from draftree.runner.masks import LayerKind, PassMasks
from draftree.runner.plan import Plan, Segment


class SegmentRows:
    """Of the rows of `segment`, which enter a run of layers as x [B, n, d]."""

    def __init__(
        self, tables: AngleTables, segment: Segment, plan: Plan, cache: SlotCache, first: int, x: Tensor
    ) -> None:
        self.tables, self.segment, self.cache = tables, segment, cache
        self._prompt_lengths, self._dtype = plan.prompt_lengths, x.dtype
        self._angles: dict[str | None, Any] = {}
        self.masks = PassMasks(segment, cache, first, x.dtype, plain_row=True)
        self._folded: dict[tuple[LayerKind, int], Tensor | None] = {}

    def angles(self, kind: LayerKind) -> Any:
        """The angles in layers of that kind, as the layers take them."""
        name = self.tables.name(kind)
        if name not in self._angles:
            self._angles[name] = self.look_up(kind)
        return self._angles[name]

    def look_up(self, kind: LayerKind) -> Any:
        """The angles, not kept."""
        return self.tables.of(self.segment, self._prompt_lengths, self._dtype, self.cache, kind)

    def mix(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """The attention of queries [B, kv, groups * n, dim] in a layer of that kind."""
        return heads(query, keys, values, self.mask(kind, heads.groups))

    def mask(self, kind: LayerKind, groups: int) -> Tensor | None:
        """The additive mask repeated for every query head of a group: [B, 1, groups * n, K]."""
        key = (kind, groups)
        if key not in self._folded:
            mask = self.masks.additive(kind)
            if mask is not None and groups > 1 and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, groups, 1)
            self._folded[key] = mask
        return self._folded[key]
