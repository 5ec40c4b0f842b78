"""Surgeries behind one that drops rows: who is left is known only in the pass, so they are fitted to it there.

A drafter describes its surgeries for all rows of the pass. Where a pruner has dropped some before, the rows that looked
ahead of those are not appended, and the others see what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftree.runner.plan import Surgery


def numbers_of(alive: Tensor) -> Tensor:
    """Where [B, T] is true, ascending and padded with -1: LongTensor [B, K]."""
    counts = alive.sum(1)
    most = int(counts.max())
    order = alive.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return order.masked_fill(torch.arange(most, device=alive.device) >= counts[:, None], -1)


def added(surgery: Surgery) -> int:
    """How many rows it appends."""
    return 0 if surgery.positions is None else surgery.positions.shape[1]


def following(surgery: Surgery, total: int) -> Surgery:
    """`surgery`, which describes `total` rows, for those of them that are left."""
    if surgery.append is None:
        return surgery
    return replace(surgery, resolve=_Resolve(total))


@dataclass(frozen=True, slots=True)
class _Resolve:
    """Brings a surgery that describes all rows to those that are left (see `Surgery.resolve`).

    Attributes:
        total: rows that had a number before this surgery.
    """

    total: int

    def __call__(self, surgery: Surgery, rows: Tensor) -> Surgery:
        visible, positions, append = surgery.visible, surgery.positions, surgery.append
        assert visible is not None
        assert positions is not None
        assert append is not None
        total, batch = self.total, len(rows)
        real = rows >= 0
        place = torch.full((batch, total + 1), -1, dtype=torch.long, device=rows.device)
        local = torch.arange(rows.shape[1], device=rows.device).expand(batch, -1)
        place = place.scatter(1, torch.where(real, rows, total), local)[:, :total]
        alive = ~(visible[:, :, :total] & (place < 0)[:, None]).any(2)
        stay = numbers_of(alive)
        index = stay.clamp(min=0)
        left = stay >= 0
        wide = index[:, :, None]
        # Columns: the rows that are left, then the appended ones that are.
        columns = torch.cat([torch.where(real, rows, 0), total + index], 1)
        seen = visible.gather(1, wide.expand(-1, -1, visible.shape[2]))
        seen = seen.gather(2, columns[:, None].expand(-1, index.shape[1], -1))
        seen &= torch.cat([real, left], 1)[:, None]
        itself = torch.eye(index.shape[1], dtype=torch.bool, device=rows.device)
        seen[:, :, rows.shape[1] :] |= itself & ~left[:, :, None]  # padding must see something
        source = torch.arange(total, device=rows.device).expand(batch, -1) if surgery.source is None else surgery.source
        return replace(
            surgery,
            source=place.gather(1, source).clamp(min=0),
            append=_Chosen(append, index),
            positions=positions.gather(1, index),
            visible=seen,
            numbers=(total + index).masked_fill(~left, -1),
        )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Some of the rows [B, K, d] that `make` makes, by index [B, K]."""

    make: Callable[[Tensor], Tensor]
    index: Tensor

    def __call__(self, given: Tensor) -> Tensor:
        made = self.make(given)
        return made.gather(1, self.index.to(made.device)[:, :, None].expand(-1, -1, made.shape[2]))
