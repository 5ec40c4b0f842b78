"""ProPD's dynamic token trees as published (Zhong et al., 2024, section 4.2), to be compared with the package's own.

The tree is the same for all requests and for many steps: the n places of it, by depth and rank, that are most often the
truth by the product of each depth's shares over all ranks. n is chosen again only when the batch or the length of the
texts has shifted, by a weighted line through the times of the sizes met so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from draftree.drafting.base import Context, Drafter, StepPlan
from draftree.errors import check_least
from draftree.pruning import EarlyPruning
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Outcome, Shape, Sizer
from draftree.shaping.by_rank import ByRank
from draftree.shaping.cost_line import CostLine
from draftree.tree import TokenTree

SHIFT = 32  # tokens by which texts have to grow for the size to be chosen again; the paper says "significantly"


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
        self.max_nodes, self.alpha, self.fading = max_nodes, alpha, fading
        self.shares = ByRank(conditional=False, alpha=share_alpha)

    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: EarlyPruning | None = None, *, packed: bool = True
    ) -> ProPDSizer:
        """See `Shape.bind`; the line begins with the passes that were measured, as the paper does not say how it does.

        Raises:
            ValueError: nothing was measured.
        """
        if cost is None:
            raise ValueError("ProPDTree has to know what steps cost: give `bind` a StepCost.")
        return ProPDSizer(self, cost)


class ProPDSizer(Sizer):
    """`ProPDTree` at work in one engine.

    Args:
        shape: its options and shares.
        cost: of steps, as measured.
    """

    def __init__(self, shape: ProPDTree, cost: StepCost) -> None:
        self._shape, self._cost = shape, cost
        self._lines: dict[int, CostLine] = {}  # by number of requests, of steps by draft tokens of a tree
        self._size = 0
        self._chosen_at: tuple[int, int] | None = None  # the batch, and the tokens of its texts in units of SHIFT

    def plan(self, requests: Sequence[Context], most: int, *, closed: bool = False) -> StepPlan:
        """See `Sizer.plan`: every step drafts whole trees, as heads make all candidates at once."""
        takes = [request.drafting and request.room > 1 for request in requests]
        return StepPlan(requests, [min(self._shape.max_nodes, most) if take else 0 for take in takes], takes)

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        """See `Sizer.trim`: the chosen number of places of each tree."""
        if trees.width == 1:
            return replace(plan, trees=trees)
        shares = self._shape.shares
        shares.remember(plan.requests, trees)
        worth = np.sort(shares.worth(trees)[:, 1:], axis=1)[:, ::-1]
        batch = len(plan.requests)
        situation = batch, sum(len(request.tokens) for request in plan.requests) // (batch * SHIFT)
        if situation != self._chosen_at:
            lengths = 1 + worth.sum(0).cumsum() / batch  # l(n) of n = 1, 2, ...
            seconds = self._line(batch).of(np.arange(1, len(lengths) + 1))
            self._size, self._chosen_at = int(np.argmax(lengths / seconds)) + 1, situation
        return replace(plan, trees=shares.weighed(trees).best(self._size))

    def observe(self, plan: StepPlan, outcome: Outcome) -> None:
        """See `Sizer.observe`: T_perf of the tree's size, and the shares of the places that are decided by now."""
        self._shape.shares.compare(plan.requests)
        if outcome.seconds is not None and plan.trees is not None and plan.trees.width > 1:
            self._line(len(plan.requests)).observe(plan.trees.width - 1, outcome.seconds)

    def end(self, request: Context) -> None:
        """See `Sizer.end`."""
        self._shape.shares.forget(request)

    def _line(self, batch: int) -> CostLine:
        line = self._lines.get(batch)
        if line is None:
            rows = self._cost.rows[self._cost.rows >= 2]
            seed = StepCost(rows - 1, self._cost.of(batch * rows))  # a tree of n draft tokens has n + 1 rows
            line = self._lines[batch] = CostLine(seed, alpha=self._shape.alpha, fading=self._shape.fading)
        return line
