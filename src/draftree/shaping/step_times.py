"""What steps take, by what is in them: plain passes, passes with rows that a drafter attaches, and pruned ones.

Each kind has a curve of its own for each number of requests, all of the shape that was measured, until their steps say
otherwise: one request's context is read for each row, a batch's for each of its requests. What is done before a pass,
above all the drafter's own work, is kept apart from it, as it does not depend on the rows.
"""

from __future__ import annotations

from enum import Enum

from draftree.runner.step_cost import StepCost

RATE = 0.1  # weight of a step in the time of drafting; the first ones weigh more
STALL = 3.0  # times the usual, as a single step counts


class Kind(Enum):
    """What is in a pass besides the rows of the trees."""

    TREES = "trees"
    ATTACHED = "attached"
    PRUNED = "pruned"


class StepTimes:
    """Seconds of steps, by what one request's passes `cost` by rows; real steps correct that where it `learns`."""

    def __init__(self, cost: StepCost, *, learns: bool = True) -> None:
        self._cost = cost
        self.learns = learns
        self._curves: dict[tuple[int, Kind], StepCost] = {}
        self._drafting: dict[tuple[int, int], tuple[float, int]] = {}  # by requests and way: seconds, steps

    def curve(self, requests: int, kind: Kind = Kind.TREES) -> StepCost:
        """Seconds of passes over so many requests, by rows; everything behind the pass is counted with it."""
        key = (requests, kind)
        found = self._curves.get(key)
        if found is None:
            plain = self._curves.get((requests, Kind.TREES), self._cost)
            found = self._curves[key] = plain.for_batch() if self.learns else plain
        return found

    def plain(self, requests: int) -> float:
        """Seconds of a step without draft tokens."""
        return float(self.curve(requests).table[requests])

    def drafting(self, requests: int, way: int) -> float:
        """Seconds of drafting in that way, before the pass."""
        return self._drafting.get((requests, way), (0.0, 0))[0]

    def observe(self, requests: int, kind: Kind, rows: int, seconds: float) -> None:
        """A pass of that kind with so many rows, and what followed it in its step, took `seconds`."""
        if self.learns:
            self.curve(requests, kind).observe(rows, seconds)

    def observe_drafting(self, requests: int, way: int, seconds: float) -> None:
        """Drafting in that way took `seconds`."""
        mean, steps = self._drafting.get((requests, way), (0.0, 0))
        if steps > 2:
            seconds = min(seconds, STALL * mean)
        self._drafting[requests, way] = (mean + max(1 / (steps + 1), RATE) * (seconds - mean), steps + 1)
