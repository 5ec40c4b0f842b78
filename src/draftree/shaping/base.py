"""How many guesses a step verifies: a shape sets the drafters' budgets and trims what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftree.drafting.base import Context, Drafter
from draftree.runner.step_cost import StepCost
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.early import EarlyPruning


class Shape(ABC):
    """Base of all shapes; one instance learns about one drafter's guesses."""

    def bind(
        self,
        cost: StepCost,
        drafter: Drafter | None = None,
        pruner: EarlyPruning | None = None,
        *,
        packed: bool = True,
    ) -> None:
        """Meet the machine and the parts that share a pass.

        Args:
            cost: what a step costs by its number of rows.
            drafter: makes the guesses.
            pruner: drops guesses inside the pass; None for none.
            packed: whether only real rows cost, and not the padding of smaller trees.
        """

    def rests(self, requests: Sequence[Context]) -> bool:
        """Whether this step has no guesses and prepares none, so that the shape need not be told of it either."""
        return False

    @abstractmethod
    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """Guesses to ask for, for each request; `most` is what the drafter can use.

        Says in `Context.resting` whether the next step will ask as well.
        """

    def trim(self, requests: Sequence[Context], trees: TokenTree) -> TokenTree:
        """The trees to verify: the best part of each drafted tree."""
        return trees

    def clock(self, rows: int, seconds: float, whole: float, *, plain: bool = True, attached: bool = True) -> None:
        """A step is over.

        Args:
            rows: of its trees, in all.
            seconds: for the pass and reading its choices.
            whole: for all of the step, guessing and learning included.
            plain: whether the trees' rows passed all layers alone.
            attached: whether the drafter had rows or looks of its own in the pass, if it is one that has any.
        """

    def rested(self, batch: int, seconds: float, whole: float) -> None:
        """A step is over of which the shape wanted to hear nothing (`rests`).

        Args:
            batch: requests in it.
            seconds: for the pass and reading its choices.
            whole: for all of the step.
        """

    def learn(self, requests: Sequence[Context], walks: Sequence[Sequence[int]], trees: TokenTree) -> None:
        """The requests' tokens have grown; what was drafted for them can be compared with what came.

        Args:
            requests: of the step.
            walks: nodes of each tree that were walked, the root first.
            trees: that were verified.
        """

    def end(self, request: Context) -> None:
        """The request is over."""


class Fixed(Shape):
    """The same node budget every step, whatever it costs.

    Args:
        node_budget: guesses per request and step.
        spawn: nodes of a tree that a drafter inside the model attaches rows to, the likeliest to be accepted last;
            None for all that it would by itself.
    """

    def __init__(self, node_budget: int, spawn: int | None = None) -> None:
        if node_budget < 0:
            raise ValueError(f"node_budget is {node_budget}: give 0 (no drafting) or more.")
        if spawn is not None and spawn < 1:
            raise ValueError(f"spawn is {spawn}: give 1 (the root) or more, or None for all nodes.")
        self.node_budget = node_budget
        self.spawn = spawn

    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """See `Shape.budgets`."""
        for request in requests:
            request.resting, request.spawn = self.node_budget == 0, self.spawn
        return [min(self.node_budget, most)] * len(requests)
