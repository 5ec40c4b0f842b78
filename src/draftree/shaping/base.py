"""How many guesses a step verifies: a shape sets the drafters' budgets and trims what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from draftree.host.cost import StepCost
from draftree.tree import TokenTree


class Shape(ABC):
    """Base of all shapes; one instance learns about one drafter's guesses."""

    def bind(self, cost: StepCost) -> None:
        """Meet the machine: what a step costs by its number of rows."""

    @abstractmethod
    def budgets(self, count: int, most: int) -> list[int]:
        """Guesses to ask for, for each of `count` requests; `most` is what the drafter can use."""

    def trim(self, trees: TokenTree) -> TokenTree:
        """The trees to verify: the best part of each."""
        return trees

    def learn(self, trees: TokenTree, accepted: Sequence[Sequence[int]]) -> None:
        """Which nodes of `trees` were walked (root first), per request."""


class Fixed(Shape):
    """The same node budget every step, whatever it costs.

    Args:
        node_budget: guesses per request and step.
    """

    def __init__(self, node_budget: int) -> None:
        if node_budget < 0:
            raise ValueError(f"node_budget is {node_budget}: give 0 (no drafting) or more.")
        self.node_budget = node_budget

    def budgets(self, count: int, most: int) -> list[int]:
        """See `Shape.budgets`."""
        return [min(self.node_budget, most)] * count
