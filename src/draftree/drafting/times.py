"""What a drafter's own passes cost in steps of the target, for drafters that weigh one against the other."""

from __future__ import annotations

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

    def stepped(self, seconds: float | None) -> None:
        """A step took so long behind its draft; None for one that says nothing of others."""
        if seconds is not None:
            self.step_seconds = _smoothed(self.step_seconds, seconds)


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
