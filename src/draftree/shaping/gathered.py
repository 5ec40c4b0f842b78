"""Times of steps, told a few at a time: single ones are noisy, and to learn of one takes as long as some rows."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """Rows of a step, seconds of its pass, and of all of it."""

    rows: float
    seconds: float
    whole: float


class Gathered:
    """Steps that nobody was told of.

    Args:
        enough: how many are told together.
    """

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._steps: list[tuple[float, float, float]] = []

    def add(self, rows: float, seconds: float, whole: float) -> StepTime | None:
        """A step was taken; the average one, once there are enough."""
        self._steps.append((rows, seconds, whole))
        if len(self._steps) < self._enough:
            return None
        told = StepTime(*(sum(of) / self._enough for of in zip(*self._steps, strict=True)))
        self.clear()
        return told
