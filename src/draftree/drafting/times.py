"""What something usually takes, for drafters that weigh their own passes against the target's steps."""

from __future__ import annotations

HABIT = 0.95  # weight of the past
LONGEST = 4.0  # times the usual, as a single time counts


def smoothed(usual: float, seconds: float) -> float:
    """The usual time after one more of `seconds`; a `usual` of 0 is none yet."""
    return seconds if usual == 0 else usual + (1 - HABIT) * (min(seconds, LONGEST * usual) - usual)
