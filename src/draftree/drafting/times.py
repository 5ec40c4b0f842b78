"""What a drafter's own passes cost in steps of the target, for drafters that weigh one against the other."""

from __future__ import annotations

import time

HABIT = 0.95  # weight of the past
LONGEST = 4.0  # times the usual, as a single time counts


class OwnTimes:
    """Times a drafter's passes and the target's steps as they run.

    Args:
        first_price: of a pass in steps, before both were timed.
    """

    def __init__(self, first_price: float) -> None:
        self._first_price = first_price
        self.pass_seconds = self.step_seconds = 0.0
        self._passed = False
        self._handed_over = 0.0  # when the last draft was; 0 where its step has been seen

    @property
    def price(self) -> float:
        """What a pass costs, in steps."""
        timed = self.pass_seconds and self.step_seconds
        return self.pass_seconds / self.step_seconds if timed else self._first_price

    def passed(self, seconds: float) -> None:
        """A pass took so long; the first one of all makes what later ones find ready, and does not count."""
        if self._passed:
            self.pass_seconds = _smoothed(self.pass_seconds, seconds)
        self._passed = True

    def drafted(self) -> None:
        """The draft is handed over: its step begins."""
        self._handed_over = time.perf_counter()

    def stepped(self, *, with_prompt: bool) -> None:
        """A step is over; one that read a prompt says nothing of others."""
        if self._handed_over and not with_prompt:
            self.step_seconds = _smoothed(self.step_seconds, time.perf_counter() - self._handed_over)
        self._handed_over = 0.0


def check_confidence(confidence: float | None) -> None:
    """Refuse what is no probability below which drafting on stops, and not None: where it no longer pays.

    Raises:
        ValueError: a number out of range.
    """
    if confidence is not None and not 0 <= confidence <= 1:
        raise ValueError(f"confidence is {confidence}: give a probability from 0 (never stop) to 1, or None.")


def _smoothed(usual: float, seconds: float) -> float:
    """The usual time after one more of `seconds`; a `usual` of 0 is none yet."""
    return seconds if usual == 0 else usual + (1 - HABIT) * (min(seconds, LONGEST * usual) - usual)
