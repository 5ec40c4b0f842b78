"""The cache of a training pass: nothing is kept, nothing is written in place, so gradients find their way.

Training runs the very plans that inference runs, through the same host. Only the cache differs: every sequence is
whole in its pass, so there is no context to keep, and the deep prefix is put in front of the rows by concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.host.cache import SlotCache


class GradientCache(SlotCache):
    """Gives a layer the deep prefix and the rows of the pass, as one differentiable tensor.

    Args:
        layers: number of decoder layers.
        batch: number of sequences.
        prefix: per-layer (keys, values) that rows may see, each [kv heads, P, head dim], or [B, ..] where they differ
            by sequence; None for none.
    """

    def __init__(self, layers: int, batch: int, prefix: Sequence[tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__(layers, batch)
        self.prefix = list(prefix) if prefix else None
        self.prefix_length = self.prefix[0][0].shape[-2] if self.prefix else 0

    def open(self, first: int, count: int, rows: int) -> None:
        """See `SlotCache.open`; there is nothing to make room for."""
        self._first, self._count = first, count

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows [B, heads, n, dim] behind the deep prefix: [B, heads, P + n, dim]."""
        if self.prefix is None:
            return key_states, value_states
        keys, values = self.prefix[layer_idx]
        return self._join(keys, key_states), self._join(values, value_states)

    def _join(self, front: Tensor, rows: Tensor) -> Tensor:
        if front.dim() == 4:
            front = front[self._first : self._first + self._count]
        return torch.cat([front.to(rows).expand(rows.shape[0], -1, -1, -1), rows], 2)
