"""Step times by the kind of pass: plain, with rows that a drafter attaches, and pruned.

Each kind has a curve for each number of requests. All start from the measured one, until their own steps correct them.
Seconds before the pass, mostly the drafter's work, are separate, as they do not depend on the rows.
"""

from __future__ import annotations

from enum import Enum

from draftree.runner.step_cost import StepCost

RATE = 0.1  # weight of a step in the mean time of drafting; the first ones weigh more
STALL = 3.0  # the most that one step counts, in means


class Kind(Enum):
    """The kind of a pass."""

    TREES = "trees"
    ATTACHED = "attached"
    PRUNED = "pruned"


class StepTimes:
    """Seconds of steps: they start from `cost`, a curve of one request; with `learns` real steps correct it."""

    def __init__(self, cost: StepCost, *, learns: bool = True) -> None:
        self._cost = cost
        self.learns = learns
        self._curves: dict[tuple[int, Kind], StepCost] = {}
        self._drafting: dict[tuple[int, int], tuple[float, int]] = {}  # by requests and way: seconds, steps

    def curve(self, requests: int, kind: Kind = Kind.TREES) -> StepCost:
        """Return seconds from the pass to the end of the step, by rows, for this number of requests."""
        key = (requests, kind)
        found = self._curves.get(key)
        if found is None:
            plain = self._curves.get((requests, Kind.TREES), self._cost)
            found = self._curves[key] = plain.for_batch() if self.learns else plain
        return found

    def plain(self, requests: int) -> float:
        """Return seconds of a step without draft tokens."""
        return float(self.curve(requests).table[requests])

    def drafting(self, requests: int, way: int) -> float:
        """Return seconds of drafting before the pass."""
        return self._drafting.get((requests, way), (0.0, 0))[0]

    def observe(self, requests: int, kind: Kind, rows: int, seconds: float) -> None:
        """Record the seconds of a step from its pass on."""
        if self.learns:
            self.curve(requests, kind).observe(rows, seconds)

    def observe_drafting(self, requests: int, way: int, seconds: float) -> None:
        """Record the seconds of drafting."""
        mean, steps = self._drafting.get((requests, way), (0.0, 0))
        if steps > 2:
            seconds = min(seconds, STALL * mean)
        self._drafting[requests, way] = (mean + max(1 / (steps + 1), RATE) * (seconds - mean), steps + 1)
