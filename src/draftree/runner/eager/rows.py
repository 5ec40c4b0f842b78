"""What all layers of one segment share in a pass of any shape: angles, masks, and how rows attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from draftree.runner.cpu.layers import CompiledAngles
from draftree.runner.eager.attention import Attention, attend_row_by_row
from draftree.runner.eager.layer import Angles
from draftree.runner.kv.cache import SlotCache
from draftree.runner.layout.masks import LayerKind, PassMasks
from draftree.runner.plan import Plan, Segment

if TYPE_CHECKING:
    from draftree.runner.eager.runner import EagerRunner


class SegmentRows:
    """Of the rows of `segment`, which enter a run of layers as x [B, n, d]."""

    def __init__(
        self, runner: EagerRunner, segment: Segment, plan: Plan, cache: SlotCache, first: int, x: Tensor
    ) -> None:
        self._runner, self._of = runner, (segment, plan.rope_floor, x.dtype, cache)
        self._angles: dict[str | None, Angles | CompiledAngles] = {}
        self.masks = PassMasks(segment, cache, first, x.dtype, plain_row=True)
        self.row_by_row = plan.row_by_row
        self._columns: dict[LayerKind, list[list[Tensor]]] = {}
        self._folded: dict[tuple[LayerKind, int], Tensor | None] = {}

    def angles(self, kind: LayerKind) -> Angles | CompiledAngles:
        """The angles in layers of that kind."""
        name = self._runner.angle_name(kind)
        if name not in self._angles:
            self._angles[name] = self._runner.angles(*self._of, kind)
        return self._angles[name]

    def mix(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """The attention of queries [B, kv, groups * n, dim] in a layer of that kind."""
        if self.row_by_row:
            return attend_row_by_row(heads, query, keys, values, self.columns(kind))
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

    def columns(self, kind: LayerKind) -> list[list[Tensor]]:
        """The columns that each row of each request sees, in order."""
        if kind not in self._columns:
            self._columns[kind] = [[row.nonzero()[:, 0] for row in seen] for seen in self.masks.boolean(kind)]
        return self._columns[kind]
