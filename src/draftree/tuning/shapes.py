"""All that tuning knows of the contract of shapes: ones that keep times, one that verifies nothing, replays at a shape.

Whoever changes the contract of a shape changes this file, and nothing else of tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from draftree.drafting.base import Context, Drafter
from draftree.host.cost import StepCost
from draftree.pruning import EarlyPruning
from draftree.shaping import DynamicTree, Fixed, Shape
from draftree.tree import TokenTree

Spent = tuple[float, float]  # seconds of a pass, and of the whole step
Draft = Callable[[Sequence[Context], Sequence[int]], TokenTree]


class OnlyRoots(Shape):
    """No draft token is asked for, and the drafter prepares the next step's all the same; keeps what steps took."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """See `Shape.budgets`."""
        for request in requests:
            request.resting = False
        return [0] * len(requests)

    def clock(self, rows: int, seconds: float, whole: float, *, plain: bool = True, attached: bool = True) -> None:
        """See `Shape.clock`."""
        self.steps.append(whole)


class Timed(Fixed):
    """Trees of one size, and what the engine says that their steps took: (rows, seconds of the pass, whole)."""

    def __init__(self, node_budget: int) -> None:
        super().__init__(node_budget)
        self.steps: list[tuple[int, float, float]] = []

    def clock(self, rows: int, seconds: float, whole: float, *, plain: bool = True, attached: bool = True) -> None:
        """See `Shape.clock`."""
        self.steps.append((rows, seconds, whole))


class Clocked(DynamicTree):
    """Trees sized by cost that keep what steps took, and begin with a curve that no other run bends.

    Attributes:
        first: the curve before the first step.
        taken: what steps took, in order, of the steps that the shape sized.
        rests_taken: the same of those of which it wanted to hear nothing more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._own: StepCost | None = None
        self.first: StepCost | None = None
        self.taken: list[Spent] = []
        self.rests_taken: list[Spent] = []

    def bind(
        self,
        cost: StepCost,
        drafter: Drafter | None = None,
        pruner: EarlyPruning | None = None,
        *,
        packed: bool = True,
    ) -> None:
        """See `Shape.bind`."""
        if self._own is None:
            self._own, self.first = (StepCost(cost.rows, cost.seconds) for _ in range(2))
        super().bind(self._own, drafter, pruner, packed=packed)

    def clock(self, rows: int, seconds: float, whole: float, *, plain: bool = True, attached: bool = True) -> None:
        """See `Shape.clock`."""
        self.taken.append((seconds, whole))
        super().clock(rows, seconds, whole, plain=plain, attached=attached)

    def rested(self, batch: int, seconds: float, whole: float) -> None:
        """See `Shape.rested`."""
        self.rests_taken.append((seconds, whole))
        super().rested(batch, seconds, whole)


class Sizing:
    """A shape in a replay, one request at a time.

    Args:
        shape: sizes the trees; it learns.
        drafter: whose trees they are.
        cost: a curve that the shape may bend.
        times: seconds of steps that it is given, in the order of `Clocked`; where they end, what the replay predicts.
    """

    def __init__(self, shape: Shape, drafter: Drafter, cost: StepCost, times: tuple[Iterator[Spent], Iterator[Spent]]):
        self._shape, self._drafter, self._times = shape, drafter, times
        self._resting = True
        shape.bind(cost, drafter)

    def trees(self, request: Context) -> TokenTree | None:
        """The trees to verify in the coming step; None where the drafter is not asked."""
        self._resting = self._shape.rests([request])
        if self._resting:
            return None
        budgets = self._shape.budgets([request], self._drafter.max_nodes)
        if request.room <= 1 or not any(budgets):
            return None
        return self._shape.trim([request], self._drafter.draft([request], budgets))

    def attached(self, request: Context) -> bool:
        """Whether the drafter has rows of its own in the step's pass."""
        return self._drafter.prepares and not request.resting and request.room > 1

    def rows(self, request: Context, nodes: int) -> int:
        """Rows of a pass over so many nodes, the drafter's own counted."""
        return int(self._drafter.rows(nodes, 1, request.spawn))

    def learn(self, request: Context, accepted: Sequence[int], trees: TokenTree) -> None:
        """The request's tokens have grown by what the nodes `accepted` of its tree and the model said."""
        if not self._resting:
            self._shape.learn([request], [list(accepted)], trees)

    def took(self, nodes: int, spent: Spent, *, plain: bool, attached: bool) -> None:
        """The step is over: nodes of its tree, what is predicted that it took, whether these were all its rows."""
        if self._resting:
            self._shape.rested(1, *next(self._times[1], spent))
        else:
            self._shape.clock(nodes, *next(self._times[0], spent), plain=plain, attached=attached)

    def end(self, request: Context) -> None:
        """The request is over."""
        self._shape.end(request)
