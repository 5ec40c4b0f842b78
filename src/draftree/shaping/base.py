"""How many draft tokens a step verifies: what a shape is, and the simplest one.

A `Shape` is what a user chooses. Bound to an engine it gives a `Sizer`, which plans each step, trims what is drafted
for it, and sees what it brought.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from draftree.drafting.base import Drafter, RequestState, StepPlan
from draftree.errors import check_least
from draftree.runner.step_cost import StepCost
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.pruner import Pruner


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step took and brought.

    Attributes:
        accepted: nodes of each tree on the accepted path, see `Step`.
        rows: tree rows that were computed, padding counted where it costs.
        seconds: of the whole step; None where a prompt was in it, which says nothing about other steps.
        drafting: seconds of it before the pass: planning, drafting and trimming.
        attached: whether the drafter had rows or taps of its own in the pass.
        pruned: whether draft tokens may have left the pass on its way.
    """

    accepted: Sequence[Sequence[int]]
    rows: int
    seconds: float | None
    drafting: float
    attached: bool = False
    pruned: bool = False


class Sizer(ABC):
    """A shape at work in one engine."""

    @abstractmethod
    def plan(self, requests: Sequence[RequestState], most: int, *, closed: bool = False) -> StepPlan:
        """What the coming step is to draft, and whether to prepare the one after it.

        Args:
            requests: of the step.
            most: draft tokens that the drafter can use.
            closed: whether nobody joins these requests before all of them are done.
        """

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        """The plan with what is verified: the best part of each drafted tree."""
        return replace(plan, trees=trees)

    def observe(self, plan: StepPlan, outcome: Outcome) -> None:
        """A step is over, and its tokens are the requests'."""

    def end(self, request: RequestState) -> None:
        """The request is over."""


class Shape(ABC):
    """Base of all shapes.

    Attributes:
        measures: whether `bind` wants the measured cost of steps.
    """

    measures: bool = False

    @abstractmethod
    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: Pruner | None = None, *, packed: bool = True
    ) -> Sizer:
        """The shape at work in one engine; what is learned may be shared by all that one shape gives.

        Args:
            cost: what a step costs by its number of rows; None where the shape does not measure.
            drafter: drafts.
            pruner: drops draft tokens inside the pass; None for none.
            packed: whether only real rows cost, and not the padding of smaller trees.
        """


class Fixed(Shape, Sizer):
    """The same number of draft tokens every step, whatever it costs.

    Args:
        node_budget: draft tokens per request and step.
        attach_to: nodes of a tree that a drafter inside the model attaches rows to, the most likely to be the last
            accepted; None for all that it would by itself.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, node_budget: int, attach_to: int | None = None) -> None:
        check_least(0, node_budget=node_budget)
        if attach_to is not None and attach_to < 1:
            raise ValueError(f"attach_to is {attach_to}: give 1 (the root) or more, or None for all nodes.")
        self.node_budget = node_budget
        self.attach_to = attach_to

    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: Pruner | None = None, *, packed: bool = True
    ) -> Sizer:
        """See `Shape.bind`: the same for all engines, as it keeps nothing."""
        return self

    def plan(self, requests: Sequence[RequestState], most: int, *, closed: bool = False) -> StepPlan:
        takes = [request.drafting and request.room > 1 and self.node_budget > 0 for request in requests]
        budgets = [min(self.node_budget, most) if take else 0 for take in takes]
        return StepPlan(requests, budgets, takes, attach_to=self.attach_to)
