"""Rows of several drafters in one pass: side by side on the way in, and renumbered on the way out.

An attachment counts its rows as if its drafter were alone: the tree's nodes, the rows that enter with it, those that
its surgeries append. In a joint pass the rows of others stand between them. So every row of a drafter gets a place
among all rows, what it sees is expressed in those places, and after the pass each drafter is shown its own rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from draftree.drafting.base import Attachment, Step
from draftree.runner.plan import Segment, Surgery
from draftree.tree import TokenTree

Named = tuple[str, Attachment | None]  # a drafter's name and what it attaches


@dataclass(frozen=True, slots=True)
class Joint:
    """One attachment of several drafters."""

    attachment: Attachment | None  # what passes, or None
    taps: tuple[tuple[int, ...], ...]  # layers that each drafter taps
    # Per drafter, the place of each of its rows among all, counted from the trees' roots; None where all are as it
    # counts them.
    places: tuple[list[int] | None, ...]
    total: int = 0  # rows in all

    def view(self, step: Step, drafter: int) -> Step:
        """`step` as drafter number `drafter` would have seen it alone."""
        result, places = step.result, self.places[drafter]
        hidden = {layer: states for layer, states in result.hidden.items() if layer in self.taps[drafter]}
        if places is None or not step.own_rows or not hidden:
            return replace(step, result=replace(result, hidden=hidden))
        offset = step.offset
        if result.rows is None:
            device = result.logits.device
            own = torch.tensor([*range(offset), *(offset + place for place in places)], device=device, dtype=torch.long)
            hidden = {layer: states[:, own[own < states.shape[1]]] for layer, states in hidden.items()}
            return replace(step, result=replace(result, hidden=hidden))
        # Rows have left in mid-stack, and rows are found by their numbers: those of others get none.
        numbers = torch.full((offset + self.total + 1,), -1, dtype=torch.long, device=result.logits.device)
        numbers[:offset] = torch.arange(offset, device=numbers.device)
        numbers[[offset + place for place in places]] = offset + torch.arange(len(places), device=numbers.device)
        segments = [_renumbered(segment, numbers) for segment in result.segments]
        return replace(step, result=replace(result, hidden=hidden, segments=segments))


def _renumbered(segment: Segment, numbers: Tensor) -> Segment:
    """`numbers` [rows + 1] by old number; the last one is that of padding."""
    rows = segment.rows
    if rows is None:
        rows = torch.arange(segment.positions.shape[1], device=numbers.device).expand(len(segment.positions), -1)
    return replace(segment, rows=numbers[rows])


def join(parts: Sequence[Named], trees: TokenTree) -> Joint:
    """The attachments of several drafters to a pass over `trees` as one.

    Raises:
        ValueError: one drops rows in mid-stack and another has rows of its own.
    """
    taps = tuple(() if part is None else tuple(part.taps) for _, part in parts)
    union = tuple(sorted({layer for layers in taps for layer in layers}))
    with_rows = [part for _, part in parts if part is not None and (part.embeddings is not None or part.surgeries)]
    nowhere: tuple[list[int] | None, ...] = (None,) * len(parts)
    if len(with_rows) < 2:
        # Others read the nodes alone, and those stand first in any case.
        one = with_rows[0] if with_rows else Attachment()
        if any(part is not None for _, part in parts):
            return Joint(one if one.taps == union else replace(one, taps=union), taps, nowhere)
        return Joint(None, taps, nowhere)
    for name, part in parts:
        if part is not None and any(surgery.keep is not None for surgery in part.surgeries):
            raise ValueError(f"{name} drops rows inside the pass, which leaves no others their places: use it alone.")
    return _Joining(parts, trees).joined(union, taps)


class _Joining:
    """Lays out the rows of several attachments: the nodes, all entering rows by drafter, all appended ones by layer."""

    def __init__(self, parts: Sequence[Named], trees: TokenTree) -> None:
        self.parts = [part or Attachment() for _, part in parts]
        self.nodes, self.batch, self.device = trees.width, trees.batch, trees.device
        self.total = self.nodes
        self.places: list[list[int]] = []
        for part in self.parts:
            entering = 0 if part.embeddings is None else part.embeddings.shape[1]
            self.places.append([*range(self.nodes), *range(self.total, self.total + entering)])
            self.total += entering

    def joined(self, union: tuple[int, ...], taps: tuple[tuple[int, ...], ...]) -> Joint:
        entering = [(i, part) for i, part in enumerate(self.parts) if part.embeddings is not None]
        made = Attachment(taps=union)
        if entering:
            made.embeddings = torch.cat([p.embeddings for _, p in entering if p.embeddings is not None], 1)
            made.positions = torch.cat([p.positions for _, p in entering if p.positions is not None], 1)
            made.visible = torch.cat(
                [self._widened(p.visible, i, self.total) for i, p in entering if p.visible is not None], 1
            )
        seeing = [(i, part.prefix_rows) for i, part in enumerate(self.parts) if part.prefix_rows is not None]
        if seeing:
            made.prefix_rows = torch.zeros(self.batch, self.total, dtype=torch.bool, device=self.device)
            for i, rows in seeing:
                made.prefix_rows[:, self.places[i]] |= rows
        found = [(surgery.layer, i, surgery) for i, part in enumerate(self.parts) for surgery in part.surgeries]
        found.sort(key=lambda entry: entry[:2])
        made.surgeries = tuple(
            self._surgery(layer, [(i, surgery) for _, i, surgery in group])
            for layer, group in groupby(found, key=lambda entry: entry[0])
        )
        return Joint(made, taps, tuple(self.places), self.total)

    def _widened(self, visible: Tensor, drafter: int, total: int) -> Tensor:
        """What rows of a drafter see, [B, m, n] of its own first n rows, in the places of `total` rows."""
        wide = torch.zeros(self.batch, visible.shape[1], total, dtype=torch.bool, device=self.device)
        wide[:, :, self.places[drafter][: visible.shape[2]]] = visible
        return wide

    def _surgery(self, layer: int, group: list[tuple[int, Surgery]]) -> Surgery:
        """What several drafters do before one layer."""
        hide = any(surgery.hide_prefix for _, surgery in group)
        makers: list[tuple[int, Callable[[Tensor], Tensor]]] = []
        sources, positions, visible = [], [], []
        adding = [(i, surgery) for i, surgery in group if surgery.append is not None]
        for i, surgery in adding:
            if surgery.append is None or surgery.positions is None or surgery.visible is None:
                raise ValueError("A surgery that appends rows must give their `positions` and `visible`.")
            places = torch.tensor(self.places[i], device=self.device, dtype=torch.long)
            source = places.expand(self.batch, -1) if surgery.source is None else places[surgery.source]
            makers.append((source.shape[1], surgery.append))
            sources.append(source)
            positions.append(surgery.positions)
            added = surgery.positions.shape[1]
            self.places[i] += range(self.total, self.total + added)
            self.total += added
        if not makers:
            return Surgery(layer, hide_prefix=hide)
        for i, surgery in adding:
            assert surgery.visible is not None
            visible.append(self._widened(surgery.visible, i, self.total))
        return Surgery(
            layer,
            append=_Makers(tuple(makers)),
            positions=torch.cat(positions, 1),
            visible=torch.cat(visible, 1),
            source=torch.cat(sources, 1),
            hide_prefix=hide,
        )


@dataclass(frozen=True, slots=True)
class _Makers:
    """Rows that several drafters make, each of its share of the rows given."""

    makers: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]

    def __call__(self, given: Tensor) -> Tensor:
        shares = given.split([count for count, _ in self.makers], 1)
        return torch.cat([make(share) for share, (_, make) in zip(shares, self.makers, strict=True)], 1)
