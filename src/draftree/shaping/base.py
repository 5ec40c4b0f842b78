"""The shape's contract, and `Fixed`, the simplest shape.

A user chooses a `Shape`. Bound to an engine it gives a `Sizer`, which plans each step, trims its drafted trees, and
observes the outcome.
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
    """The rows, seconds and accepted paths of one step."""

    accepted: Sequence[Sequence[int]]  # Nodes of each tree on the accepted path, see `Step`.
    rows: int  # Tree rows that were computed, padding counted where it costs.
    seconds: float | None  # Of the whole step; None if it also read a prompt.
    drafting: float  # Seconds of planning, drafting and trimming.
    attached: bool = False  # Whether the drafter had rows or taps of its own in the pass.
    pruned: bool = False  # Whether early pruning may have dropped draft tokens.


class Sizer(ABC):
    """A shape at work in one engine."""

    @abstractmethod
    def plan(self, requests: Sequence[RequestState], most: int) -> StepPlan:
        """Return what the coming step drafts, and whether it prepares the one after it.

        Args:
            most: draft tokens that the drafter can use.
        """

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        """Return the plan with the trees to verify: the best part of each drafted tree."""
        return replace(plan, trees=trees)

    def observe(self, plan: StepPlan, outcome: Outcome) -> None:
        """Learn from a step, whose tokens the requests have by now."""

    def end(self, request: RequestState) -> None:
        """Drop the state of a request that ended."""


class Shape(ABC):
    """Base of all shapes.

    Attributes:
        measures: whether `bind` needs the measured cost of steps.
    """

    measures: bool = False

    @abstractmethod
    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: Pruner | None = None, *, packed: bool = True
    ) -> Sizer:
        """Return the sizer of one engine; sizers of one shape may share what they learn.

        Args:
            cost: seconds of a step by its number of rows; None if the shape does not measure.
            packed: whether only real rows cost; otherwise trees are padded to the largest.
        """


class Fixed(Shape, Sizer):
    """The same number of draft tokens in every step.

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
        """Return the shape itself, which has no state."""
        return self

    def plan(self, requests: Sequence[RequestState], most: int) -> StepPlan:
        takes = [request.drafting and request.remaining > 1 and self.node_budget > 0 for request in requests]
        budgets = [min(self.node_budget, most) if take else 0 for take in takes]
        return StepPlan(requests, budgets, takes, attach_to=self.attach_to)
