"""Keeps every step's outcome that the engine gives a shape; the shape works as it would alone."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.drafting.base import Context, Drafter, StepPlan
from draftree.pruning import EarlyPruning
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Outcome, Shape, Sizer
from draftree.tree import TokenTree


class Listening(Shape):
    """Another shape, and what its steps took and brought.

    Args:
        inner: the shape.

    Attributes:
        outcomes: of all steps, in their order.
        cost: what a step cost as the first engine measured it; None where the shape does not measure.
    """

    def __init__(self, inner: Shape) -> None:
        self.inner = inner
        self.measures = inner.measures
        self.outcomes: list[Outcome] = []
        self.cost: StepCost | None = None

    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: EarlyPruning | None = None, *, packed: bool = True
    ) -> Sizer:
        """See `Shape.bind`."""
        self.cost = self.cost or cost
        return _Listener(self.inner.bind(cost, drafter, pruner, packed=packed), self.outcomes)


class _Listener(Sizer):
    """A sizer, whose steps are put into `outcomes`."""

    def __init__(self, inner: Sizer, outcomes: list[Outcome]) -> None:
        self._inner, self._outcomes = inner, outcomes

    def plan(self, requests: Sequence[Context], most: int, *, closed: bool = False) -> StepPlan:
        """See `Sizer.plan`."""
        return self._inner.plan(requests, most, closed=closed)

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        """See `Sizer.trim`."""
        return self._inner.trim(plan, trees)

    def observe(self, plan: StepPlan, outcome: Outcome) -> None:
        """See `Sizer.observe`."""
        self._outcomes.append(outcome)
        self._inner.observe(plan, outcome)

    def end(self, request: Context) -> None:
        """See `Sizer.end`."""
        self._inner.end(request)
