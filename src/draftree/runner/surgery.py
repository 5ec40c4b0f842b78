"""Rows that leave and join in mid-stack, for every runner."""

from __future__ import annotations

import torch
from torch import Tensor

from draftree.runner.plan import Plan, Segment, Surgery, join


def logit_slice(plan: Plan, segment: Segment) -> slice:
    """Return the rows of the final `segment` that get logits."""
    last = plan.last_logit_row
    if segment.rows is not None and last is not None:
        # The rows that are left are in ascending order.
        last = int(((segment.rows >= 0) & (segment.rows < last)).sum(1).max())
    return slice(plan.first_logit_row, last)


def operate(segment: Segment, surgery: Surgery, hidden: Tensor, width: int) -> tuple[Segment, Tensor]:
    """Apply `surgery` to `hidden` [B, n, d]; return the new segment and the new hidden states.

    Appended rows are numbered from `width` on, the number of rows that enter the plan. In a model spread over devices,
    states and segment may lie on different ones.
    """
    batch, count, _ = hidden.shape
    device = segment.positions.device
    rows = segment.rows
    keep = surgery.keep(hidden) if callable(surgery.keep) else surgery.keep
    if rows is None and keep is not None:
        rows = torch.arange(count, device=device).expand(batch, count)
    positions, visible, prefix_rows = segment.positions, segment.visible, segment.prefix_rows
    if surgery.hide_prefix:
        prefix_rows = None
    if keep is not None:
        assert rows is not None
        keep = keep.to(device)
        real = keep >= 0
        index = keep.clamp(min=0)
        kept = index.shape[1]
        hidden = _pick(hidden, index)
        positions = positions.gather(1, index)
        rows = rows.gather(1, index).masked_fill(~real, -1)
        visible = visible.gather(1, index[..., None].expand(-1, -1, count))
        visible = visible.gather(2, index[:, None, :].expand(-1, kept, -1)) & real[:, None, :] & real[..., None]
        visible = visible | torch.eye(kept, dtype=torch.bool, device=device)
        if prefix_rows is not None:
            prefix_rows = prefix_rows.gather(1, index)
    if surgery.resolve is not None and rows is not None:
        surgery = surgery.resolve(surgery, rows)
    if surgery.append is not None:
        assert surgery.positions is not None
        assert surgery.visible is not None
        extra = surgery.append(hidden if surgery.source is None else _pick(hidden, surgery.source))
        added = extra.shape[1]
        if surgery.numbers is not None and rows is not None:
            rows = torch.cat([rows, surgery.numbers], 1)
        elif rows is not None:
            known = max(width, int(rows.max()) + 1) if rows.numel() else width
            rows = torch.cat([rows, torch.arange(known, known + added, device=device).expand(batch, added)], 1)
        hidden = torch.cat([hidden, extra.to(hidden)], 1)
        positions = torch.cat([positions, surgery.positions], 1)
        visible = join(visible, surgery.visible)
        if prefix_rows is not None:
            prefix_rows = torch.nn.functional.pad(prefix_rows, (0, added))
    return Segment(surgery.layer, rows, positions, visible, prefix_rows), hidden


def _pick(hidden: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` [B, k] of states [B, n, d], as [B, k, d]."""
    return hidden.gather(1, index.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[2]))
