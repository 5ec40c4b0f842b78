"""The description of one pass through the model, without naming a model or a method.

Drafters and the engine describe rows (tokens or embeddings), positions and who sees whom; runners carry the
description out. The only coupling between methods and models is this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Surgery:
    """A change of the rows on their way into decoder layer `layer` (1 .. layers - 1).

    First `keep` drops rows, then `resolve` fits the rest to what is left, then `append` adds rows behind them.

    Attributes:
        layer: index of the first decoder layer that sees the changed rows.
        keep: LongTensor [B, K] of row numbers (ascending, padded with -1), or a function of the hidden states
            [B, N, d] at that point which returns one, or None where all rows stay (early pruning, ProPD section 4.1).
        append: function of the hidden states [B, K, d] after `keep` returning new rows [B, M, d]
            (Hidden Transfer, section 3.2).
        positions: LongTensor [B, M], positions of the appended rows.
        visible: BoolTensor [B, M, K + M], which surviving and appended rows each appended row sees. Every
            appended row sees the whole context.
        source: LongTensor [B, S], the rows that `append` is given, in this order; None for all K of them.
        resolve: function of this surgery and the row numbers [B, K] that are left (padded with -1), returning the
            surgery to carry out: for surgeries behind a `keep` that is not known beforehand.
        numbers: LongTensor [B, M], row numbers of the appended rows, where `resolve` left some of them out; by default
            they are numbered on.
    """

    layer: int
    keep: Tensor | Callable[[Tensor], Tensor | None] | None = None
    append: Callable[[Tensor], Tensor] | None = None
    positions: Tensor | None = None
    visible: Tensor | None = None
    source: Tensor | None = None
    resolve: Callable[[Surgery, Tensor], Surgery] | None = None
    numbers: Tensor | None = None


def join(visible: Tensor, more: Tensor) -> Tensor:
    """Join masks: visible [B, K, K] of earlier rows, more [B, M, K + M] of rows behind them, which those do not see."""
    return torch.cat([torch.nn.functional.pad(visible, (0, more.shape[1])), more], 1)


@dataclass(slots=True)
class Plan:
    """One pass of the target over B requests with N rows each.

    Attributes:
        tokens: LongTensor [B, N], token ids of the entering rows.
        positions: LongTensor [B, N], position of each row in its request (0 = first prompt token).
        visible: BoolTensor [B, N, N]; row i sees row j of this pass. Committed context is always visible, except where
            this is wider: [B, N, C + N] covers the last C committed KV positions as well, which is how a drafter's own
            model grows a tree over several passes. A request with less context has True in the positions it lacks. Not
            to be combined with surgeries; windows take such a position's number for its token position.
        embeddings: floating [B, M, d]; the last M rows enter with these embeddings, not their tokens'.
        prefix_rows: BoolTensor [B, N]; rows that see the cache's deep prefix (none by default).
        surgeries: changes of rows mid-stack, ascending by layer.
        taps: layers whose incoming hidden states are returned; `layers` itself taps what the last one returns.
        first_logit_row: rows before this one get no logits (a prompt's rows need none).
        last_logit_row: rows from this one on get none either (of a drafter's rows, those behind one node matter, and
            that node is known only when the pass is over: see `Runner.logits`). None for no such rows. Where rows leave
            in mid-stack, the row numbers get logits in which any request still has a row before this one.
        prompt_lengths: length of each prompt, [B] on the CPU. Length-dependent rotary embeddings choose frequencies for
            no shorter text, as in Hugging Face's own prefill.
        row_by_row: in recorded passes each row attends over its context and its branch alone, as it would in a pass
            of its own. Slower; makes 16-bit results independent of the other rows. The runner `cpu` does so always.
        sizes: real rows of each request, the first ones, where nothing but these matters; None where all are.
        prompt: the rows are the next ones of a prompt, and all of them are committed. Recurrent layers read prompts
            by the model's functions for many tokens.
        images: arguments of the model's `forward` for images, of one prompt that passes whole and alone, by the model's
            own mask and angles.
        shifts: what is added to each request's positions for rotary angles, behind images; empty for nothing.
    """

    tokens: Tensor
    positions: Tensor
    visible: Tensor
    embeddings: Tensor | None = None
    prefix_rows: Tensor | None = None
    surgeries: tuple[Surgery, ...] = ()
    taps: tuple[int, ...] = ()
    first_logit_row: int = 0
    prompt_lengths: tuple[int, ...] = ()
    row_by_row: bool = False
    last_logit_row: int | None = None
    sizes: tuple[int, ...] | None = None
    prompt: bool = False
    images: Mapping[str, Any] | None = None
    shifts: tuple[int, ...] = ()

    @classmethod
    def causal(cls, tokens: Tensor, first: int = 0, **more: Any) -> Plan:
        """Return a plan of causal rows [B, N] from position `first` on; `more` as above."""
        count, width = tokens.shape
        positions = torch.arange(first, first + width, device=tokens.device)
        square = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
        return cls(tokens, positions.expand(count, -1), square.expand(count, -1, -1), **more)

    @property
    def batch(self) -> int:
        """Number of requests."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Number of entering rows per request, padding included."""
        return self.tokens.shape[1]

    @property
    def appended(self) -> int:
        """Number of rows per request that surgeries append."""
        return sum(s.positions.shape[1] for s in self.surgeries if s.positions is not None)

    @property
    def bare(self) -> bool:
        """True if no row sees the deep prefix."""
        return self.prefix_rows is None

    @property
    def plain(self) -> bool:
        """True if tokens enter and pass through every layer, without taps, surgeries or embeddings."""
        return self.unchanged and not self.taps

    @property
    def unchanged(self) -> bool:
        """True if tokens enter and pass through every layer, without surgeries or embeddings."""
        return not (self.surgeries or self.row_by_row or self.embeddings is not None or self.prefix_rows is not None)

    def angle_positions(self, positions: Tensor) -> Tensor:
        """Return what rotary angles are made of, for rows at these positions [B, n]."""
        if not any(self.shifts):
            return positions
        return positions + torch.tensor(self.shifts, dtype=torch.long, device=positions.device)[:, None]

    def to(self, device: torch.device) -> Plan:
        """Return the plan with its tensors on `device`; itself if they are there."""
        if self.tokens.device == device:
            return self
        surgeries = tuple(_moved(surgery, device) for surgery in self.surgeries)
        return replace(_moved(self, device), surgeries=surgeries)


def _moved(held: Any, device: torch.device) -> Any:
    """Return a copy of a plan or surgery with its tensors on `device`."""
    tensors = {one.name: value for one in fields(held) if isinstance(value := getattr(held, one.name), Tensor)}
    return replace(held, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(slots=True)
class Segment:
    """The rows as one run of layers sees them: built by the runner from a plan and its surgeries."""

    start: int  # first layer of the run
    # LongTensor [B, n]; original row number (appended rows are numbered on from N; padding is -1), or None where no
    # row has left, so that row i is number i.
    rows: Tensor | None
    positions: Tensor  # LongTensor [B, n]
    visible: Tensor  # BoolTensor [B, n, n]
    prefix_rows: Tensor | None = None  # BoolTensor [B, n] or None


@dataclass(slots=True)
class PassResult:
    """The result of a pass."""

    logits: Tensor  # [B, n, V] of the final segment's rows from `first_logit_row` on, up to `last_logit_row`
    segments: list[Segment]  # the row layouts that the cache holds, one per run of layers
    # Tapped hidden states [B, n at that layer, d] by layer.
    hidden: dict[int, Tensor] = field(default_factory=dict)
    runner: Any = None  # the `Runner` of the pass, for logits of tapped rows
    shift: int = 0  # of a pass with images: the `shifts` of the request's later passes

    @property
    def rows(self) -> Tensor | None:
        """Original row numbers [B, n] of the final rows, None where none has left and row i is number i."""
        return self.segments[-1].rows


# ---------------------------------------------------------------- rows that leave and join in mid-stack


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
