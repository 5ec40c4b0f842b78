"""Attention between the two halves of a layer, in tensor operations."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.runner.masks import LayerKind


class Rows(Protocol):
    """What all layers of one segment share."""

    def angles(self, kind: LayerKind) -> Any:
        """The angles in layers of that kind."""

    def mix(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """The attention of queries [B, kv, groups * n, dim] in a layer of that kind, of the same shape."""


class Attention(NamedTuple):
    """How a layer attends.

    Attributes:
        groups: query heads to a key/value head.
        scaling: of the scores.
        cap: scores are bent to stay within -cap .. cap; None where they are not.
    """

    groups: int
    scaling: float
    cap: float | None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of queries [B, kv, n, dim] under an additive mask."""
        if self.cap is None:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
        scores = self.cap * torch.tanh(query @ keys.mT * (self.scaling / self.cap))
        if mask is not None:
            scores = scores + mask
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def attend(layer: Any, x: Tensor, index: int, rows: Rows, kind: LayerKind, cap: float | None) -> Tensor:
    """The whole of a layer: its first half, attention, its second half; may change and return x [B, n, d]."""
    angles = rows.angles(kind)
    query, keys, values = layer.enter(x, angles, index)
    heads = Attention(layer.parts.heads.groups, layer.parts.scaling, cap)
    return layer.leave(x, rows.mix(heads, query, keys, values, kind), angles)
