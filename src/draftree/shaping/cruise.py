"""Steps between two plans: a tree of the size that has been best of late, verified as it comes.

To weigh a tree and to learn from it takes as long as a few rows of a small model. Where drafting pays, only every
fourth step does so; those between ask for the size that is best on the average of the last plans, and look at nothing
(ProPD plans again when things have shifted, section 4.2.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

BETWEEN = 3  # steps between two plans
HABIT = 0.9  # weight of the past in what guesses bring
MOST = 24  # guesses of such a step
SHARE = 0.3  # of the time that a planned step takes beside its rows, what one between takes
AVERAGE = (1 + BETWEEN * SHARE) / (1 + BETWEEN)  # the same over all steps


@dataclass(slots=True)
class _Course:
    """Of one request: tokens expected of a step by its guesses [MOST + 1], guesses now, and steps to go with them."""

    gains: np.ndarray = field(default_factory=lambda: np.zeros(0))
    size: int = 0
    left: int = 0


class Cruise:
    """How many guesses each request's steps have until the next plan."""

    def __init__(self) -> None:
        self._of: dict[int, _Course] = {}

    def due(self, request: int) -> int:
        """Guesses of a step that is not planned, which is one of those to go; 0 for a step to be planned."""
        course = self._of.get(request)
        if course is None or not course.left:
            return 0
        course.left -= 1
        return course.size

    def plan(self, request: int, worth: np.ndarray, seconds: np.ndarray, aside: float) -> None:
        """A step was planned, and steps like it may follow.

        Args:
            request: its id.
            worth: [n], probability that each guess is walked, falling.
            seconds: [MOST + 1] or more, of steps with one row, two, and so on.
            aside: seconds that a planned step takes beside its rows, for drafting.
        """
        gains = np.zeros(MOST + 1)
        gains[0] = 1.0
        worth = worth[:MOST]
        gains[1 : 1 + len(worth)] = worth
        gains = gains.cumsum()
        course = self._of.setdefault(request, _Course())
        course.gains = HABIT * course.gains + (1 - HABIT) * gains if len(course.gains) else gains
        times = seconds[: MOST + 1] + SHARE * aside
        size = 1 + int((course.gains[1:] / times[1:]).argmax())
        size |= 1  # with the root an even number of rows, which costs no more than one less
        pays = course.gains[min(size, MOST)] / times[min(size, MOST)] > 1 / seconds[0]
        course.size, course.left = (size, BETWEEN) if pays else (0, 0)

    def end(self, request: int) -> None:
        """The request is over."""
        self._of.pop(request, None)
