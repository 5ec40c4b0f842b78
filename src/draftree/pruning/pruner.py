"""Prune the passes of one engine with the options of an `EarlyPruning`.

A drafter describes its surgeries for all rows, but which rows stay is known only inside the pass. So later surgeries
are fitted to the rows that are left: rows that look ahead of a dropped row are not appended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.runner.base import Runner
from draftree.runner.plan import Plan, Surgery, join
from draftree.runner.step_cost import StepCost
from draftree.runner.target import Target
from draftree.tree import TokenTree

HABIT = 0.95  # weight of the past in means
STAY_FIRST = 0.4  # share of draft tokens that stay, before any pass was pruned; the paper's trees keep 0.2 to 0.4
AGAIN = 64  # passes without pruning before one that measures again
DEAREST = 4.0  # the most that one measurement counts, in means


@dataclass(slots=True)
class Looks:
    """Measurements of pruned passes, over all engines of one pruner."""

    stay: float = STAY_FIRST  # Share of the draft tokens that stay.
    cost: float = 0.0  # Seconds of the early head over those of a pass of as many rows; 0 before the first engine.


class Worth:
    """Decides for the passes of one engine.

    Args:
        target: the model, which is pruned behind `layer` layers.
        cost: of its steps; None prunes every pass.
    """

    def __init__(self, looks: Looks, target: Target, layer: int, cost: StepCost | None) -> None:
        self._looks, self._cost = looks, cost
        self._share = layer / len(target.layers)  # of the layers, those before the pruning
        self._missed = 0  # passes since one was pruned
        if not looks.cost:
            # A row costs this much in the head against all layers, until it has been measured.
            layers = sum(p.numel() for one in target.layers for p in one.parameters())
            looks.cost = target.hidden_size * target.vocab_size / max(layers, 1)

    def rows(self, rows: Any) -> Any:
        """Return the rows through all layers that a pruned pass of `rows` rows (a number or an array) amounts to."""
        pruned = rows * (self._share + (1 - self._share) * self._looks.stay + self._looks.cost)
        return pruned if self._cost is None else np.minimum(rows, pruned)

    def pays(self, rows: int) -> bool:
        """Return whether to prune a pass of `rows` rows; sometimes only to measure again."""
        if self._cost is None:
            return True
        full, rest = (float(seconds) for seconds in self._cost.of((rows, max(self._looks.stay * rows, 1.0))))
        if (1 - self._share) * (full - rest) > self._looks.cost * full:
            self._missed = 0
            return True
        self._missed += 1
        return self._missed % AGAIN == 0

    def note(self, share: float, seconds: float, rows: int) -> None:
        """Record the share of draft tokens that stayed, and the seconds of the early head."""
        self._looks.stay += (1 - HABIT) * (share - self._looks.stay)
        if self._cost is not None:
            spent = min(seconds / float(self._cost.of(rows)), DEAREST * self._looks.cost)
            self._looks.cost += (1 - HABIT) * (spent - self._looks.cost)


class Pruner:
    """Prunes the passes of one runner behind `layer` layers, by the `top_k` likeliest tokens."""

    def __init__(
        self,
        runner: Runner,
        weights: torch.nn.Module,
        worth: Worth,
        clock: Callable[[], float],
        *,
        layer: int,
        top_k: int,
    ) -> None:
        self._runner, self._weights, self._layer, self._top_k = runner, weights, layer, top_k
        self.worth, self.clock = worth, clock

    def enter(self, plan: Plan, trees: TokenTree) -> Plan:
        """Return the plan of a pass over `trees` (which begin at row 0), with pruning where it pays."""
        if trees.width <= 2 or not self.worth.pays(plan.batch * plan.width):
            return plan
        if any(s.keep is not None for s in plan.surgeries):
            raise ValueError("The drafter drops rows inside the pass already: leave pruner=None with it.")
        layer = self._layer
        before = [s for s in plan.surgeries if s.layer < layer]
        same = next((s for s in plan.surgeries if s.layer == layer), None)
        visible = plan.visible
        for surgery in before:
            visible = visible if surgery.visible is None else join(visible, surgery.visible)
        cut = partial(self._cut, trees, visible)
        total = visible.shape[1]
        surgeries = [*before, Surgery(layer, keep=cut)]
        if same is not None:
            surgeries[-1] = replace(_following(same, total), keep=cut)
            total += _added(same)
        for surgery in plan.surgeries:
            if surgery.layer > layer:
                surgeries.append(_following(surgery, total))
                total += _added(surgery)
        return replace(plan, surgeries=tuple(surgeries))

    def _cut(self, trees: TokenTree, visible: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the rows that stay, given the states of all (`Surgery.keep`); None for all of them.

        Args:
            visible: BoolTensor [B, T, T], the attention mask of the nodes and the rows attached behind them.
        """
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)  # the queued layers are not part of the measured time
        began, nodes = self.clock(), trees.width
        states = hidden[:, :nodes].to(trees.tokens.device)  # layers may be on several devices
        alive = self.alive(states, trees.tokens, trees.parents, trees.ancestors)
        drafted = max(sum(trees.sizes) - trees.batch, 1)
        share = (int(alive.sum()) - trees.batch) / drafted
        self.worth.note(share, self.clock() - began, hidden.shape[0] * hidden.shape[1])
        if visible.shape[1] > nodes:
            # An attached row is dropped with any node that it sees, as it looks ahead of that node.
            behind = ~(visible[:, nodes:, :nodes] & ~alive[:, None]).any(2)
            alive = torch.cat([alive, behind], 1)
        return None if bool(alive.all()) else _numbers_of(alive)

    def alive(self, hidden: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor) -> Tensor:
        """Return the nodes that stay, BoolTensor [B, N]: with all their ancestors, roots always, padding never.

        Args:
            hidden: [B, N, d], the nodes' states after the layers before the pruning.
            tokens, parents: LongTensor [B, N].
            ancestors: BoolTensor [B, N, N].
        """
        inner, place = _inner(parents)
        states = hidden if inner is None else hidden.gather(1, inner[:, :, None].expand(-1, -1, hidden.shape[2]))
        logits = self._weights(states, self._runner.head).to(tokens.device)  # [B, I, V]
        requests = torch.arange(len(tokens), device=tokens.device)[:, None]
        drafted = tokens[:, 1:].clamp(min=0)
        predicted = logits[requests, place]  # [B, N - 1, V]
        own = predicted.gather(2, drafted[:, :, None])
        real = parents[:, 1:] >= 0
        gone = ((predicted > own).sum(2) >= self._top_k) | ~real
        stays = ~(ancestors[:, 1:, 1:] & gone[:, None]).any(2)
        return torch.nn.functional.pad(stays, (1, 0), value=True)


def _inner(parents: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the nodes with children, LongTensor [B, I] ascending (0 in padding), and each parent's index in it.

    None stands for all nodes if they are not on the CPU, where counting them would wait for the device.
    """
    above = parents[:, 1:].clamp(min=0)
    if not parents.is_cpu:
        return None, above
    held = above.numpy()
    found = [np.unique(row, return_inverse=True) for row in held]
    width = max(len(nodes) for nodes, _ in found)
    inner = np.zeros((len(held), width), np.int64)
    for row, (nodes, _) in zip(inner, found, strict=True):
        row[: len(nodes)] = nodes
    return torch.from_numpy(inner), torch.from_numpy(np.stack([place.reshape(-1) for _, place in found]))


def _numbers_of(alive: Tensor) -> Tensor:
    """Return the indices where [B, T] is true, ascending and padded with -1: LongTensor [B, K]."""
    counts = alive.sum(1)
    most = int(counts.max())
    order = alive.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return order.masked_fill(torch.arange(most, device=alive.device) >= counts[:, None], -1)


def _added(surgery: Surgery) -> int:
    """Return the number of rows that it appends."""
    return 0 if surgery.positions is None else surgery.positions.shape[1]


def _following(surgery: Surgery, total: int) -> Surgery:
    """Return `surgery`, which describes `total` rows, for the rows that are left."""
    return surgery if surgery.append is None else replace(surgery, resolve=partial(_resolved, total))


def _resolved(total: int, surgery: Surgery, rows: Tensor) -> Surgery:
    """Fit a surgery that describes all rows to the rows that are left (see `Surgery.resolve`).

    Args:
        total: rows that had a number before this surgery.
        rows: LongTensor [B, N], numbers of the rows that are left; -1 in padding.
    """
    visible, positions, append = surgery.visible, surgery.positions, surgery.append
    assert visible is not None
    assert positions is not None
    assert append is not None
    batch = len(rows)
    real = rows >= 0
    place = torch.full((batch, total + 1), -1, dtype=torch.long, device=rows.device)
    local = torch.arange(rows.shape[1], device=rows.device).expand(batch, -1)
    place = place.scatter(1, torch.where(real, rows, total), local)[:, :total]
    alive = ~(visible[:, :, :total] & (place < 0)[:, None]).any(2)
    stay = _numbers_of(alive)
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
        append=partial(_chosen, append, index),
        positions=positions.gather(1, index),
        visible=seen,
        numbers=(total + index).masked_fill(~left, -1),
    )


def _chosen(make: Callable[[Tensor], Tensor], index: Tensor, given: Tensor) -> Tensor:
    """Return rows `index` [B, I] of the rows [B, K, d] that `make` makes."""
    made = make(given)
    return made.gather(1, index.to(made.device)[:, :, None].expand(-1, -1, made.shape[2]))
