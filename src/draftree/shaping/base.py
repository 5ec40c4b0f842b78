"""How many guesses a step verifies: a shape sets the drafters' budgets and trims what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from draftree.drafting.base import Context, Drafter
from draftree.host.cost import StepCost
from draftree.tree import TokenTree


class Shape(ABC):
    """Base of all shapes; one instance learns about one drafter's guesses."""

    def bind(self, cost: StepCost, drafter: Drafter | None = None) -> None:
        """Meet the machine, by what a step costs by its number of rows, and the drafter."""

    @abstractmethod
    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """Guesses to ask for, for each request; `most` is what the drafter can use.

        Says in `Context.resting` whether the next step will ask as well.
        """

    def trim(self, requests: Sequence[Context], trees: TokenTree) -> TokenTree:
        """The trees to verify: the best part of each drafted tree."""
        return trees

    def clock(self, rows: int, seconds: float) -> None:
        """A step over trees of `rows` rows in all took `seconds`."""

    def learn(self, requests: Sequence[Context]) -> None:
        """The requests' tokens have grown; what was drafted for them can be compared with what came."""

    def end(self, request: Context) -> None:
        """The request is over."""


class Fixed(Shape):
    """The same node budget every step, whatever it costs.

    Args:
        node_budget: guesses per request and step.
    """

    def __init__(self, node_budget: int) -> None:
        if node_budget < 0:
            raise ValueError(f"node_budget is {node_budget}: give 0 (no drafting) or more.")
        self.node_budget = node_budget

    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """See `Shape.budgets`."""
        for request in requests:
            request.resting = self.node_budget == 0
        return [min(self.node_budget, most)] * len(requests)
