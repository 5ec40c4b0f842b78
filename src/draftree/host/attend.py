"""Attention between the two halves of a layer, in tensor operations."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.host.masks import LayerKind
from draftree.host.skip import Omitted


class Rows(Protocol):
    """What all layers of one segment share."""

    row_by_row: bool

    def angles(self, kind: LayerKind) -> Any:
        """The angles in layers of that kind."""

    def mask(self, kind: LayerKind, groups: int) -> Tensor | None:
        """The additive mask repeated for every query head of a group: [B, 1, groups * n, K]."""

    def columns(self, kind: LayerKind) -> list[list[Tensor]]:
        """The columns that each row of each request sees, in order."""


def attend(layer: Any, x: Tensor, index: int, rows: Rows, kind: LayerKind, cap: float | None) -> Tensor:
    """The whole of a layer: its first half, attention, its second half; may change and return x [B, n, d]."""
    scaling, angles = layer.parts.scaling, rows.angles(kind)
    if Omitted.ATTENTION in layer.omitted:
        return layer.leave(x, None, angles)
    query, keys, values = layer.enter(x, angles, index)
    if rows.row_by_row:
        mixed = _mix_row_by_row(query, keys, values, rows.columns(kind), scaling, cap)
    else:
        mixed = _mix(query, keys, values, rows.mask(kind, layer.parts.heads.groups), scaling, cap)
    return layer.leave(x, mixed, angles)


def _mix(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, cap: float | None) -> Tensor:
    """Attention of queries [B, kv, n, dim]; scores are bent to stay within -cap .. cap where there is a cap."""
    if cap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    scores = cap * torch.tanh(query @ keys.mT * (scaling / cap))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def _mix_row_by_row(
    query: Tensor, keys: Tensor, values: Tensor, columns: list[list[Tensor]], scaling: float, cap: float | None
) -> Tensor:
    """The attention calls of one-row passes: a column that is masked away would still change the order of sums."""
    mixed = torch.empty_like(query)
    for b, of_rows in enumerate(columns):
        for i, index in enumerate(of_rows):
            own = slice(i, None, len(of_rows))  # row i in every head of the group
            key, value = (t[b : b + 1].index_select(2, index) for t in (keys, values))
            mixed[b : b + 1, :, own] = _mix(query[b : b + 1, :, own], key, value, None, scaling, cap)
    return mixed
