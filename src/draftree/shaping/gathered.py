"""Times of steps, told a few at a time: single ones are noisy, and to learn of one takes as long as some rows."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """Rows of a step, seconds of its pass, and of all of it."""

    rows: int
    seconds: float
    whole: float


class Gathered:
    """Steps that nobody was told of.

    Args:
        enough: how many are told together.
    """

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self._steps: list[StepTime] = []

    def clear(self) -> None:
        """Forget them."""
        self._steps = []

    def add(self, rows: int, seconds: float, whole: float) -> list[StepTime]:
        """A step was taken; all of them, once there are enough, else none."""
        self._steps.append(StepTime(rows, seconds, whole))
        if len(self._steps) < self._enough:
            return []
        told = self._steps
        self._steps = []
        return told
