"""What guesses bring on the average, by their place in the tree and the drafter's own log-probability of them.

Trees that are weighed tell it, and so do steps that are not planned, by the nodes that were walked in them. The
drafter's probabilities only sort guesses into cells; what those of a cell are worth is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from typing import Any

import numpy as np

from draftree.shaping.counts import CELLS, LEVELS, PARTS, PER_FACTOR, SUREST, Seen, library

OTHERS = 8  # steps that what is known of other requests counts for
PRIOR, FEW = 2.0, 0.25  # steps that the drafter's own word counts for, and guesses of each cell in one of them
HELD = 4.0  # steps that a cell counts for beside those that it was seen in, once there is one
MOST_MORE = 2.0  # factor by which steps raise what guesses are worth that were not tried in them


class Average:
    """What a request's guesses of each cell brought a step of late, and how many there were.

    Args:
        habit: most that the past weighs; less as long as there is little of it.
        usual: of other requests, which counts as much as a few trees; None for nothing.

    Attributes:
        values: float64 [3, CELLS]: guesses that were walked; guesses; and in how many steps such were looked for.
        at: where they lie.
        tried: in how many steps the likeliest were looked for.
    """

    __slots__ = ("_most", "at", "tried", "values")

    def __init__(self, habit: float, usual: Average | None = None) -> None:
        self._most = habit / (1 - habit)  # steps that the past counts for
        self.values: np.ndarray = _new() if usual is None else usual.values.copy()
        np.minimum(self.values[2], OTHERS, out=self.values[2])
        self.at = self.values.ctypes.data  # to ask for either takes longer than to plan a step
        self.tried = 0.0 if usual is None else float(self.values[2, 0])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has values of its own, and their address."""
        return _restored, (self._most, self.values)

    @property
    def known(self) -> bool:
        """Whether there were a few steps."""
        return self.tried >= OTHERS

    @property
    def past(self) -> float:
        """What the past weighs against the next step."""
        met = min(self.tried, self._most)
        return met / (met + 1)

    def count(self) -> None:
        """A tree was added where the values lie."""
        self.values[2] += 1
        self.tried += 1

    def add(self, worth: np.ndarray, cells: np.ndarray) -> None:
        """A tree's guesses are worth [n], and of these cells [n]."""
        found = np.zeros((2, CELLS))
        np.add.at(found[0], cells, worth)
        np.add.at(found[1], cells, 1)
        past = self.past
        self.values[:2] = past * self.values[:2] + (1 - past) * found
        self.count()

    def learn(self, seen: Seen, steps: int, tried: Sequence[int], weight: float = 1.0) -> None:
        """So many steps were taken.

        Args:
            seen: what they showed.
            steps: how many.
            tried: bins of each part that guesses were to be of.
            weight: of each of the steps against one of the past.
        """
        right, there, met = self.values
        looked = (np.arange(LEVELS) < np.array(tried)[:, None]).ravel()
        share = weight * steps / (np.minimum(met, self._most) + np.where(met > 0, HELD, 0.0) + weight * steps)
        before = float(right[looked].sum())
        right += np.where(looked, share * (np.asarray(seen.right) / steps - right), 0.0)
        there += np.where(looked, share * (np.asarray(seen.there) / steps - there), 0.0)
        met[looked] += weight * steps
        self.tried += weight * steps
        # Other guesses were not tried; what is known of these goes for them as well.
        more = min(float(right[looked].sum()) / before, MOST_MORE) if before > 0 else 1.0
        right[~looked] = np.minimum(right * more, SUREST * there)[~looked]


class CompiledAverage(Average):
    """The same, which learns in one call."""

    __slots__ = ()

    def learn(self, seen: Seen, steps: int, tried: Sequence[int], weight: float = 1.0) -> None:
        """See `Average.learn`."""
        compiled = library()
        assert compiled is not None
        levels = (c_int64 * PARTS)(*tried)
        compiled.counts_walked(self.at, self._most, seen.right, seen.there, steps, levels, weight)
        self.tried += weight * steps


def _new() -> np.ndarray:
    """What is known if nothing is: that guesses of a cell are as likely as the drafter says."""
    likely = np.tile(np.exp(-(np.arange(LEVELS) + 0.5) / PER_FACTOR), PARTS)
    return np.stack([FEW * likely, np.full(CELLS, FEW), np.full(CELLS, PRIOR)])


def new_average(habit: float, usual: Average | None = None) -> Average:
    """See `Average`; compiled where that can be."""
    return (Average if library() is None else CompiledAverage)(habit, usual)


def _restored(most: float, values: np.ndarray) -> Average:
    average = new_average(0.5)
    average._most = most
    average.values[:] = values
    average.tried = float(values[2, 0])
    return average
