"""From requests and trees to one plan: prompt rows that are not in the cache yet, then tree rows, then attachments.

A request's first pass carries its prompt (the trunk) in front of its tree; later passes carry the tree alone. Trunks
of different lengths are padded behind, so that all trees of a pass begin at the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftree.drafting.base import Attachment
from draftree.runner.plan import PassResult, Plan, Surgery, join
from draftree.tree import TokenTree

REACH = 256  # rows further ahead of their root than this do not exist


@dataclass(slots=True)
class TreePass:
    """A plan and where things are in it."""

    plan: Plan  # what the runner runs
    trees: TokenTree  # the trees in it
    trunk: list[int]  # per request, real prompt rows
    offset: int  # row where trees begin

    def node_rows(self, result: PassResult) -> Tensor | None:
        """Node number behind each row of the logits [B, n], -1 for other rows; None where it is row for row."""
        rows = result.rows
        return None if rows is None else nodes_behind(rows, self.offset, result.logits.shape[1], self.trees.width)

    def committed(self, accepted: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows to keep per request: its prompt rows, then the accepted nodes."""
        return [
            [*range(trunk), *(self.offset + node for node in nodes)]
            for trunk, nodes in zip(self.trunk, accepted, strict=True)
        ]


def nodes_behind(rows: Tensor, offset: int, logits: int, width: int) -> Tensor:
    """Node number behind each of `logits` columns of the final rows [B, n], -1 for rows that are no nodes.

    Args:
        rows: row numbers of the pass.
        offset: row where trees begin.
        logits: how many columns have logits.
        width: of the trees.
    """
    nodes = rows[:, offset : offset + logits] - offset
    return nodes.masked_fill((nodes < 0) | (nodes >= width), -1)


def tree_pass(
    trunks: Sequence[Sequence[int]],
    trees: TokenTree,
    starts: Sequence[int],
    attachment: Attachment | None = None,
    floors: Sequence[int] = (),
    limit: int | None = None,
    *,
    row_by_row: bool = False,
) -> TreePass:
    """Lay out one pass.

    Args:
        trunks: certain tokens before each root that are not in the cache yet (empty after the first pass).
        trees: one tree per request.
        starts: committed context length of each request.
        attachment: a drafter's own rows.
        floors: prompt lengths, for length-dependent rotary embeddings.
        limit: the model's context; draft tokens beyond it are moved back to its last position.
        row_by_row: see `Plan`.
    """
    device = trees.tokens.device
    trunk = [len(t) for t in trunks]
    offset = max(trunk)
    drafted = trees.tokens
    batch, width = drafted.shape
    begin = torch.tensor([[s + t] for s, t in zip(starts, trunk, strict=True)], device=device, dtype=torch.long)
    if offset == 0:
        plan = Plan(drafted, begin + trees.depth, trees.ancestors, sizes=trees.sizes)
    else:
        tokens = torch.zeros(batch, offset, dtype=torch.long, device=device)
        for b, certain in enumerate(trunks):
            tokens[b, : len(certain)] = torch.tensor(certain, dtype=torch.long, device=device)
        start = torch.tensor(list(starts), device=device, dtype=torch.long)[:, None]
        positions = torch.minimum(start + torch.arange(offset, device=device), begin)
        visible = torch.zeros(batch, offset + width, offset + width, dtype=torch.bool, device=device)
        visible[:, :offset, :offset] = torch.ones(offset, offset, dtype=torch.bool, device=device).tril()
        real = torch.arange(offset, device=device) < torch.tensor(trunk, device=device, dtype=torch.long)[:, None]
        visible[:, offset:, :offset] = real[:, None]
        visible[:, offset:, offset:] = trees.ancestors
        plan = Plan(
            torch.cat([tokens, drafted], 1),
            torch.cat([positions, begin + trees.depth], 1),
            visible,
            first_logit_row=offset,
        )
    plan.last_logit_row = offset + width
    plan.rope_floor = tuple(floors)
    plan.row_by_row = row_by_row
    if attachment is not None:
        _attach(plan, attachment, trees, begin, trunk)
    if limit is not None and max(s + t for s, t in zip(starts, trunk, strict=True)) + REACH >= limit:
        plan = _clamp(plan, limit - 1)
    return TreePass(plan, trees, trunk, offset)


def _clamp(plan: Plan, last: int) -> Plan:
    """No request emits tokens past the context, so rows beyond it cannot matter; only their look-up must not fail."""
    surgeries = tuple(
        s if s.positions is None else replace(s, positions=s.positions.clamp(max=last)) for s in plan.surgeries
    )
    return replace(plan, positions=plan.positions.clamp(max=last), surgeries=surgeries)


class _Laid(NamedTuple):
    """What passes without prompt rows share, as long as an attachment comes back with trees of the same structure."""

    ancestors: Tensor  # of the trees, to know them by
    offsets: Tensor  # LongTensor [B, N + M], positions of all entering rows from the root's
    visible: Tensor  # BoolTensor [B, N + M, N + M]
    surgeries: tuple[Surgery, ...]  # with `joined` filled in


def _lay(attachment: Attachment, trees: TokenTree) -> _Laid:
    offsets, visible = trees.depth, trees.ancestors
    if attachment.embeddings is not None:
        if attachment.positions is None or attachment.visible is None:
            raise ValueError("An attachment with embeddings must give their `positions` and `visible`.")
        offsets = torch.cat([offsets, attachment.positions], 1)
        visible = join(visible, attachment.visible)
    surgeries = []
    seen: Tensor | None = visible
    for surgery in attachment.surgeries:
        if surgery.keep is not None:
            seen = None  # who is left is known in the pass
        if seen is not None and surgery.visible is not None:
            seen = join(seen, surgery.visible)
            surgery = replace(surgery, joined=seen)
        surgeries.append(surgery)
    return _Laid(trees.ancestors, offsets, visible, tuple(surgeries))


def _attach(plan: Plan, attachment: Attachment, trees: TokenTree, begin: Tensor, trunk: list[int]) -> None:
    """Put a drafter's rows into a plan that was just made."""
    laid: _Laid | None = attachment.laid
    if laid is None or laid.ancestors is not trees.ancestors:
        laid = attachment.laid = _lay(attachment, trees)
    tokens, positions, visible, prefix_rows = plan.tokens, begin + laid.offsets, laid.visible, attachment.prefix_rows
    if attachment.embeddings is not None:
        tokens = torch.nn.functional.pad(tokens, (0, attachment.embeddings.shape[1]))
    offset = max(trunk)
    if offset == 0:
        surgeries = tuple(s.behind(begin) for s in laid.surgeries)
    else:
        real = torch.tensor(trunk, device=begin.device, dtype=torch.long)
        positions = torch.cat([plan.positions[:, :offset], positions], 1)
        visible = plan.visible
        if attachment.visible is not None:
            visible = join(visible, _see_trunk(attachment.visible, offset, real))
        if prefix_rows is not None:
            prefix_rows = torch.nn.functional.pad(prefix_rows, (offset, 0))
        surgeries = tuple(_shift(s, begin, offset, real) for s in attachment.surgeries)
    plan.tokens, plan.positions, plan.visible = tokens, positions, visible
    plan.embeddings, plan.prefix_rows = attachment.embeddings, prefix_rows
    plan.surgeries, plan.taps, plan.sizes = surgeries, attachment.taps, None


def _see_trunk(visible: Tensor, offset: int, trunk: Tensor) -> Tensor:
    """Put `offset` trunk columns in front of [B, m, n]; real ones are visible."""
    real = torch.arange(offset, device=visible.device) < trunk[:, None]
    return torch.cat([real[:, None].expand(-1, visible.shape[1], -1), visible], 2)


def _shift(surgery: Surgery, begin: Tensor, offset: int, trunk: Tensor) -> Surgery:
    """Express a surgery on tree rows as one on all rows: `offset` rows of the trunk stay in front, untouched."""
    keep, append, source, visible = surgery.keep, surgery.append, surgery.source, surgery.visible
    positions = None if surgery.positions is None else begin + surgery.positions

    def with_trunk(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        front = torch.arange(offset, device=rows.device).expand(rows.shape[0], -1)
        return torch.cat([front, torch.where(rows >= 0, rows + offset, rows)], 1)

    if callable(keep):
        choose = keep
        keep = lambda hidden: with_trunk(choose(hidden[:, offset:]))  # noqa: E731
    elif keep is not None:
        keep = with_trunk(keep)
    if source is not None:
        source = source + offset
    elif append is not None:
        make = append
        append = lambda hidden: make(hidden[:, offset:])  # noqa: E731
    if visible is not None:
        visible = _see_trunk(visible, offset, trunk)
    return replace(surgery, keep=keep, append=append, source=source, positions=positions, visible=visible)
