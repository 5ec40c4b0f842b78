"""ProPD's dynamic token trees as published (Zhong et al., 2024, section 4.2), to be compared with the package's own.

The tree is the same for all requests and for many steps: of the grid of all ranks of all depths the n places whose
product of shares is largest, where a share is how often the candidate of that depth and rank was the truth. n is chosen
again only when the batch or the length of the texts has shifted, by a weighted line through the times of the sizes met
so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.shapes.cost_line import CostLine
from draftree.drafting.base import ByRequest, Drafter, RequestState, StepPlan
from draftree.drafting.in_model import InModelDrafter
from draftree.errors import check_least
from draftree.pruning.pruner import Pruner
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Outcome, Shape, Sizer
from draftree.tree import TokenTree

SHIFT = 32  # tokens by which texts have to grow for the size to be chosen again; the paper says "significantly"
FIRST = 0.5  # share of the best rank before anything is known; of each next rank half of the one before


class Shares:
    """How often the candidate of a depth and a rank was the truth, moving averages by `alpha` (section 4.2.2)."""

    def __init__(self, depths: int, ranks: int, alpha: float) -> None:
        self.of_place = np.tile(FIRST * 0.5 ** np.arange(ranks), (depths, 1))
        self._alpha = alpha
        self._waiting: ByRequest[deque[tuple[int, np.ndarray]]] = ByRequest()  # candidates, and where they begin

    def remember(self, request: RequestState, tokens: np.ndarray) -> None:
        """Keep candidates [D, K] behind a request's text until all their places have been written."""
        self._waiting.setdefault(request.id, deque()).append((len(request.tokens), tokens))

    def compare(self, request: RequestState) -> None:
        """Learn from candidates whose places are all written by now."""
        waiting = self._waiting.get(request.id)
        while waiting and waiting[0][0] + len(self.of_place) <= len(request.tokens):
            begin, tokens = waiting.popleft()
            truth = np.array(request.tokens[begin : begin + len(tokens)])
            self.of_place += self._alpha * ((tokens == truth[:, None]) - self.of_place)

    def forget(self, request: RequestState) -> None:
        """The request is over; the rest of its text will not come."""
        self._waiting.pop(request.id, None)


class ProPDTree(Shape):
    """The n most probable places of a tree, n for the most tokens a second.

    Args:
        max_nodes: largest n.
        alpha: weight of a new time in the mean of its size (section 4.2.1).
        fading: lambda, how fast a size's weight in the line falls.
        share_alpha: weight of a new token in the shares (section 4.2.2).

    Raises:
        ValueError: a number out of range.
    """

    measures = True

    def __init__(
        self, max_nodes: int = 64, *, alpha: float = 0.2, fading: float = 0.02, share_alpha: float = 0.02
    ) -> None:
        check_least(1, max_nodes=max_nodes)
        CostLine(alpha=alpha, fading=fading)  # looks at its options
        if not 0 < share_alpha <= 1:
            raise ValueError(f"share_alpha is {share_alpha}: give the weight of a new token, over 0 and at most 1.")
        self.max_nodes, self.alpha, self.fading, self.share_alpha = max_nodes, alpha, fading, share_alpha
        self.shares: Shares | None = None  # made when the heads are met

    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: Pruner | None = None, *, packed: bool = True
    ) -> ProPDSizer:
        """See `Shape.bind`; the line begins with the passes that were measured, as the paper does not say how it does.

        Raises:
            ValueError: nothing was measured, or a drafter that has no candidates for each depth.
        """
        if cost is None:
            raise ValueError("ProPDTree has to know what steps cost: give `bind` a StepCost.")
        if not isinstance(drafter, InModelDrafter):
            raise ValueError(f"ProPD's trees are of candidates for each depth, and {drafter.name} has none.")
        if self.shares is None:
            self.shares = Shares(drafter.depth, drafter.candidates, self.share_alpha)
        return ProPDSizer(self, cost, drafter, self.shares, pruner)


class ProPDSizer(Sizer):
    """`ProPDTree` at work in one engine."""

    def __init__(
        self, shape: ProPDTree, cost: StepCost, drafter: InModelDrafter, shares: Shares, pruner: Pruner | None
    ) -> None:
        self._shape, self._cost, self._drafter, self._shares = shape, cost, drafter, shares
        self._pruner = pruner
        self._lines: dict[int, CostLine] = {}  # by number of requests, of steps by draft tokens of a tree
        self._size = 0
        self._chosen_at: tuple[int, int] | None = None  # the batch, and the tokens of its texts in units of SHIFT

    def plan(self, requests: Sequence[RequestState], most: int) -> StepPlan:
        """See `Sizer.plan`: every step drafts whole trees, as heads make all candidates at once."""
        takes = [request.drafting and request.remaining > 1 for request in requests]
        return StepPlan(requests, [min(self._shape.max_nodes, most) if take else 0 for take in takes], takes)

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        """See `Sizer.trim`: the chosen number of places, whatever the drafter made of its candidates."""
        if trees.width == 1:
            return replace(plan, trees=trees)
        batch = len(plan.requests)
        situation = batch, sum(len(request.tokens) for request in plan.requests) // (batch * SHIFT)
        grid = TokenTree.stack([self._tree(request, self._shape.max_nodes) for request in plan.requests])
        if situation != self._chosen_at:
            worth = np.exp(np.sort(grid.logp[:, 1:].numpy(), axis=1)[:, ::-1])
            worth[~np.isfinite(worth)] = 0.0
            lengths = 1 + worth.sum(0).cumsum() / batch  # l(n) of n = 1, 2, ...
            seconds = self._line(batch).of(np.arange(1, len(lengths) + 1))
            self._size, self._chosen_at = int(np.argmax(lengths / seconds)) + 1, situation
        return replace(plan, trees=grid.best([min(self._size, budget) for budget in plan.budgets]))

    def _tree(self, request: RequestState, nodes: int) -> TokenTree:
        """The most probable places of the grid with a request's candidates in them; the root where there are none."""
        held = self._drafter.ready(request)
        root = torch.tensor([request.tokens[-1]], dtype=torch.long, device="cpu")
        if held is None or request.remaining < 2:
            return TokenTree.roots(root)
        self._shares.remember(request, held.tokens)
        with np.errstate(divide="ignore"):
            logp = np.log(self._shares.of_place).astype(np.float32)
        logp[request.remaining - 1 :] = -np.inf  # deeper draft tokens are wasted
        return TokenTree.from_candidates(root, held.tokens[None], logp[None], [nodes], self._drafter.source)

    def observe(self, plan: StepPlan, outcome: Outcome) -> None:
        """See `Sizer.observe`: T_perf of the tree's size, and the shares of the places that are decided by now."""
        for request in plan.requests:
            self._shares.compare(request)
        if outcome.seconds is not None and plan.trees is not None and plan.trees.width > 1:
            self._line(len(plan.requests)).observe(plan.trees.width - 1, outcome.seconds)

    def end(self, request: RequestState) -> None:
        self._shares.forget(request)

    def _line(self, batch: int) -> CostLine:
        line = self._lines.get(batch)
        if line is None:
            sizes = self._cost.rows[self._cost.rows >= 2] - 1
            rows = np.array([self._drafter.rows(batch * (n + 1), batch) for n in sizes.tolist()])
            if self._pruner is not None:  # else a line would be begun that never lets pruned sizes be met
                rows = self._pruner.worth.rows(rows)
            seed = StepCost(sizes, self._cost.of(rows))
            line = self._lines[batch] = CostLine(seed, alpha=self._shape.alpha, fading=self._shape.fading)
        return line
