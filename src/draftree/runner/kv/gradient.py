"""The cache of a training pass: nothing is kept, nothing is written in place, so gradients find their way.

Training runs the very plans that inference runs, through the same runner. Only the cache differs: the deep prefix, and
the context where a pass has one, are put in front of the rows by concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.runner.kv.cache import OpenPass, SlotCache


class GradientCache(SlotCache):
    """Gives a layer the deep prefix and the rows of the pass, as one differentiable tensor.

    Args:
        layers: number of decoder layers.
        batch: number of sequences.
        prefix: per-layer (keys, values) that rows may see, each [kv heads, P, head dim], or [B, ..] where they differ
            by sequence; None for none.
        context: holds what the rows see before them, the same number of columns in every slot; no gradients go there.
            None for whole sequences.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        prefix: Sequence[tuple[Tensor, Tensor]] | None = None,
        context: SlotCache | None = None,
    ) -> None:
        super().__init__(layers, batch)
        self.prefix = list(prefix) if prefix else None
        self.prefix_length = self.prefix[0][0].shape[-2] if self.prefix else 0
        self.context = context
        if context is not None:
            self.lengths = list(context.lengths)

    def open(self, first: int, count: int, rows: int, *, bare: bool = False) -> None:
        """See `SlotCache.open`; there is nothing to make room for, and the prefix is always there."""
        self._pass = OpenPass(first, count)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows [B, heads, n, dim] behind the deep prefix and the context of C columns: [B, heads, P + C + n, dim]."""
        fronts = [] if self.prefix is None else [self.prefix[layer_idx]]
        if self.context is not None:
            fronts.append(self.context.views(layer_idx, 0))
        if not fronts:
            return key_states, value_states
        keys, values = zip(*fronts, strict=True)
        return self._join(keys, key_states), self._join(values, value_states)

    def _join(self, fronts: Sequence[Tensor], rows: Tensor) -> Tensor:
        own = self._pass.slots
        parts = [(f[own] if f.dim() == 4 else f).to(rows).expand(rows.shape[0], -1, -1, -1) for f in fronts]
        return torch.cat([*parts, rows], 2)
