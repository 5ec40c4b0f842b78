"""Early pruning: draft tokens that an early head finds unlikely leave the pass before its later layers (ProPD, 4.1).

The head reads every inner node's state after layer n and predicts what could follow; children that it does not predict
leave, with all nodes below them and all rows that a drafter attached to them. The rest of the pass is that of a smaller
tree. Any drafter's tree can be pruned so, and the text stays the model's own: a draft token that leaves is only one
that is not tried.

To look costs a product with the model's head, and is worth it only where rows cost enough and enough of them leave:
`worth` decides that from pass to pass.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftree.errors import check_least
from draftree.pruning.early_head import EarlyHead
from draftree.pruning.survivors import added, following, joined, numbers_of
from draftree.pruning.worth import Worth
from draftree.runner.base import Runner
from draftree.runner.hooked.probe import probe
from draftree.runner.plan import Plan, Surgery
from draftree.runner.step_cost import StepCost
from draftree.tree import TokenTree

CRITERIA = ("top-k", "best", "threshold")


class EarlyPruning:
    """Prunes trees inside the pass, for any drafter.

    Args:
        head: the early head; its layer is where trees are pruned.
        criterion: which draft tokens stay. "top-k": those among the head's `top_k` likeliest tokens after their parent
            (the paper's); "best": the `keep` draft tokens of highest path probability; "threshold": those whose path
            probability is at least `threshold`. Path probabilities are products of the head's along the path.
        top_k: for "top-k".
        keep: for "best".
        threshold: for "threshold".
        always: prune every pass that has two draft tokens or more, whether or not it pays.

    Raises:
        TypeError, ValueError: something that is no early head, or an option out of range.
    """

    def __init__(
        self,
        head: EarlyHead,
        *,
        criterion: str = "top-k",
        top_k: int = 50,
        keep: int = 16,
        threshold: float = 0.02,
        always: bool = False,
    ) -> None:
        if not isinstance(head, EarlyHead):
            raise TypeError(
                f"head is a {type(head).__name__}: pass an EarlyHead, as draftree.EarlyHead.from_pretrained(folder, "
                "model) gives."
            )
        if criterion not in CRITERIA:
            raise ValueError(f"criterion is {criterion!r}: choose {', '.join(CRITERIA)}.")
        check_least(1, top_k=top_k, keep=keep)
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is {threshold}: give a probability over 0 and under 1.")
        self.head = head
        self.criterion, self.top_k, self.keep, self.threshold = criterion, top_k, keep, threshold
        self.worth = Worth(always=always)
        self._weights = head.weights

    @property
    def layer(self) -> int:
        """How many layers run before trees are pruned."""
        return self.head.layer

    @property
    def passes(self) -> int:
        """How many passes were pruned."""
        return self.worth.passes

    def bind(self, runner: Runner, cost: StepCost | None = None) -> None:
        """Meet the model, and what a step costs by its number of rows; by default every pass is pruned.

        Raises:
            ValueError: a model of other shapes.
        """
        target = runner.target
        found = {
            "hidden_size": target.hidden_size,
            "layers": len(target.layers),
            "vocab_size": target.vocab_size,
        }
        for name, expected in self.head.shapes().items():
            if found.get(name) != expected:
                raise ValueError(
                    f"This early head was made for a model with {name} {expected}, and this one has {found.get(name)}: "
                    "load the head that was trained for it."
                )
        probe(target)  # runners need it for the model's head, and must not run it in the middle of a pass
        self.worth.bind(target, self.layer, cost)
        self._weights = self.head.weights
        if target.device != self.head.weights.norm.device:
            self._weights = copy.deepcopy(self.head.weights).to(target.device)

    # ---------------------------------------------------------------- a pass

    def enter(self, runner: Runner, plan: Plan, trees: TokenTree) -> Plan:
        """The plan of a pass of `runner` over `trees` (which begin at row 0), with the pruning in it where that pays.

        Raises:
            ValueError: the drafter drops rows in the pass itself.
        """
        if trees.width <= 2 or not self.worth.pays(plan.batch * plan.width):
            return plan
        if any(s.keep is not None for s in plan.surgeries):
            raise ValueError("The drafter drops rows inside the pass already: leave pruner=None with it.")
        before = [s for s in plan.surgeries if s.layer < self.layer]
        same = next((s for s in plan.surgeries if s.layer == self.layer), None)
        visible = plan.visible
        for surgery in before:
            visible = joined(visible, surgery)
        cut = _Cut(self, runner, trees.tokens, trees.parents, trees.ancestors, visible)
        total = visible.shape[1]
        surgeries = [*before, Surgery(self.layer, keep=cut)]
        if same is not None:
            surgeries[-1] = replace(following(same, total), keep=cut)
            total += added(same)
        for surgery in plan.surgeries:
            if surgery.layer > self.layer:
                surgeries.append(following(surgery, total))
                total += added(surgery)
        return replace(plan, surgeries=tuple(surgeries))

    def alive(self, runner: Runner, hidden: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor) -> Tensor:
        """Which nodes stay: BoolTensor [B, N], closed upwards; roots do, padding does not.

        Args:
            runner: applies the model's head.
            hidden: [B, N, d], the nodes' states after `layer` layers.
            tokens, parents: LongTensor [B, N].
            ancestors: BoolTensor [B, N, N].
        """
        inner, place = _inner(parents)
        states = hidden if inner is None else hidden.gather(1, inner[:, :, None].expand(-1, -1, hidden.shape[2]))
        logits = self._weights(states, runner.head)  # [B, I, V]
        requests = torch.arange(len(tokens), device=tokens.device)[:, None]
        drafted = tokens[:, 1:].clamp(min=0)
        predicted = logits[requests, place]  # [B, N - 1, V]
        own = predicted.gather(2, drafted[:, :, None])
        real = parents[:, 1:] >= 0
        if self.criterion == "top-k":
            gone = (predicted > own).sum(2) >= self.top_k
        else:
            steps = own[:, :, 0].float() - logits.float().logsumexp(2)[requests, place]
            steps = steps.masked_fill(~real, -torch.inf)
            paths = torch.where(ancestors[:, 1:, 1:], steps[:, None], 0.0).sum(2)
            if self.criterion == "threshold":
                gone = paths < np.log(self.threshold)
            else:
                gone = torch.ones_like(real)
                best = paths.topk(min(self.keep, paths.shape[1]), 1).indices
                gone.scatter_(1, best, False)
        gone |= ~real
        stays = ~(ancestors[:, 1:, 1:] & gone[:, None]).any(2)
        return torch.nn.functional.pad(stays, (1, 0), value=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The `keep` of one pass: rows that stay, given the states of all.

    Attributes:
        visible: BoolTensor [B, T, T], who sees whom among the nodes and the rows attached behind them.
    """

    pruner: EarlyPruning
    runner: Runner
    tokens: Tensor
    parents: Tensor
    ancestors: Tensor
    visible: Tensor

    def __call__(self, hidden: Tensor) -> Tensor | None:
        began = time.perf_counter()
        nodes = self.tokens.shape[1]
        alive = self.pruner.alive(self.runner, hidden[:, :nodes], self.tokens, self.parents, self.ancestors)
        real = self.parents >= 0
        real[:, 0] = True
        drafted = max(int(real.sum()) - len(real), 1)
        share = (int(alive.sum()) - len(alive)) / drafted
        self.pruner.worth.note(share, time.perf_counter() - began, hidden.shape[0] * hidden.shape[1])
        if self.visible.shape[1] > nodes:
            # An attached row goes when any node that it sees has gone: it looked ahead of that node.
            behind = ~(self.visible[:, nodes:, :nodes] & ~alive[:, None]).any(2)
            alive = torch.cat([alive, behind], 1)
        return None if bool(alive.all()) else numbers_of(alive)

    def of(self, b: int) -> _Cut:
        """For request `b` alone."""
        own = slice(b, b + 1)
        tensors = (self.tokens, self.parents, self.ancestors, self.visible)
        return _Cut(self.pruner, self.runner, *(t[own] for t in tensors))


def _inner(parents: Tensor) -> tuple[Tensor | None, Tensor]:
    """Nodes with children, LongTensor [B, I] ascending (0 in padding), and where each node's parent is in it.

    None for all nodes where they are not on the CPU, as to count them would wait for the device.
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
