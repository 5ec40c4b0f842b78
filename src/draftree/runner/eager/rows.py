"""Angles and masks that all layers of one segment share.

Angles are equal in all layers, or differ by layer kind (Gemma 3). Angles that depend on the position alone come from a
table. Families whose angles depend on the text's length compute them row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.runner.eager.layer import Angles, Attention
from draftree.runner.eager.parts import TURN_NEIGHBOURS
from draftree.runner.kv.cache import SlotCache
from draftree.runner.masks import LayerKind, PassMasks
from draftree.runner.plan import Plan, Segment
from draftree.runner.positions import Rotation, call, is_length_dependent, per_row_angles, width_of
from draftree.runner.target import Target

BLOCK = 1024  # positions by which tables grow


class AngleTables:
    """The angles of one model.

    Args:
        target: of a family in `parts`.
        dim: width of a head.

    Attributes:
        rotation: which entries of a head turn with which.
        tables: cosines by position [P, dim], and sines with their signs, by kind of layer or under None for all kinds.
            Replaced as a whole, as passes of several threads and recorded ones read them.
        by_length: whether angles depend on a text's length; the tables are not used then.
    """

    def __init__(self, target: Target, dim: int) -> None:
        self._rotary = target.decoder.rotary_emb
        self.by_length = is_length_dependent(self._rotary)
        kinds = {k.name for k in target.kinds} if isinstance(self._rotary.rope_type, dict) else {None}
        width = width_of(self._rotary, target.device, next(iter(kinds)))
        self.rotation = Rotation(width, dim, target.model_type in TURN_NEIGHBOURS, target.device)
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        self.tables = dict.fromkeys(kinds, (empty, empty))

    def name(self, kind: LayerKind) -> str | None:
        """Return the name of the angles of layers of that kind; None if all layers share them."""
        return None if None in self.tables else kind.name

    def reach(self, longest: int, dtype: torch.dtype, device: torch.device) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Return the tables, extended to positions below `longest`."""
        tables = self.tables
        if longest > min(len(cosines) for cosines, _ in tables.values()):
            positions = torch.arange(-(-longest // BLOCK) * BLOCK, device=device)
            angles = {kind: call(self._rotary, positions[None], dtype, kind) for kind in tables}
            tables = self.tables = {kind: self.rotation.spread(c[0], s[0]) for kind, (c, s) in angles.items()}
        return tables

    def of(
        self, segment: Segment, prompt_lengths: tuple[int, ...], dtype: torch.dtype, cache: SlotCache, kind: LayerKind
    ) -> Angles:
        """Return the angles of a segment's rows in layers of that kind.

        Args:
            segment: the rows.
            prompt_lengths: see `Plan`.
            dtype: of the rows' states.
            cache: where the layers put keys and values.
            kind: of the layers.
        """
        if self.by_length:
            like = torch.empty(0, dtype=dtype, device=segment.positions.device)
            cosine, sine = self.rotation.spread(*per_row_angles(self._rotary, like, segment.positions, prompt_lengths))
        else:
            tables = self.reach(int(segment.positions.max()) + 1, dtype, segment.positions.device)
            cosine, sine = (F.embedding(segment.positions, table) for table in tables[self.name(kind)])
        return Angles(cosine[:, :, None], sine[:, :, None], cache, self.rotation)


class SegmentRows:
    """Angles, masks and attention of the rows of `segment`, which enter a run of layers as x [B, n, d]."""

    def __init__(
        self, tables: AngleTables, segment: Segment, plan: Plan, cache: SlotCache, first: int, x: Tensor
    ) -> None:
        self.tables, self.segment, self.cache = tables, segment, cache
        self._prompt_lengths, self._dtype = plan.prompt_lengths, x.dtype
        self._angles: dict[str | None, Any] = {}
        self.masks = PassMasks(segment, cache, first, x.dtype, plain_row=True)
        self._folded: dict[tuple[LayerKind, int], Tensor | None] = {}

    def angles(self, kind: LayerKind) -> Any:
        """Return the angles in layers of that kind, computed once."""
        name = self.tables.name(kind)
        if name not in self._angles:
            self._angles[name] = self.look_up(kind)
        return self._angles[name]

    def look_up(self, kind: LayerKind) -> Any:
        """Compute the angles in layers of that kind."""
        return self.tables.of(self.segment, self._prompt_lengths, self._dtype, self.cache, kind)

    def mix(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """Return the attention of queries [B, kv, groups * n, dim] in a layer of that kind."""
        return heads(query, keys, values, self.mask(kind, heads.groups))

    def mask(self, kind: LayerKind, groups: int) -> Tensor | None:
        """Return the additive mask, repeated for every query head of a group: [B, 1, groups * n, K]."""
        key = (kind, groups)
        if key not in self._folded:
            mask = self.masks.additive(kind)
            if mask is not None and groups > 1 and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, groups, 1)
            self._folded[key] = mask
        return self._folded[key]
