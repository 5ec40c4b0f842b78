"""What guesses bring on the average, the first of a tree by itself, the second, and so on.

Trees that are weighed tell it, and so do steps that are not planned, by the nodes that were walked in them: no
drafter's own probabilities are needed for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from typing import Any

import numpy as np

from draftree.shaping.counts import AHEAD, SUREST, library

OTHERS = 4  # trees that what is known of other requests counts for
HELD = 4.0  # trees that a guess's worth counts for beside those that it was seen in, once there is one
MOST_MORE = 2.0  # factor by which steps raise what guesses are worth that were not tried in them
LEAST_FALL, MOST_FALL = 0.5, 0.9  # bounds of what a guess is worth against the one before, where that is not known


class Average:
    """What a request's guesses were worth of late, the first of a tree first, and how often they were there at all.

    Args:
        habit: most that the past weighs; less as long as there is little of it.
        usual: of other requests, which counts as much as a few trees; None for nothing.

    Attributes:
        values: float64 [3, AHEAD]: worth, nothing where a tree had no such guess; share of trees that had; and in how
            many trees it was looked for.
        at: where they lie.
        tried: in how many trees it was looked for the first guess.
    """

    __slots__ = ("_most", "at", "tried", "values")

    def __init__(self, habit: float, usual: Average | None = None) -> None:
        self._most = habit / (1 - habit)  # trees that the past counts for
        self.values: np.ndarray = np.zeros((3, AHEAD)) if usual is None else usual.values.copy()
        np.minimum(self.values[2], OTHERS, out=self.values[2])
        self.at = self.values.ctypes.data  # to ask for either takes longer than to plan a step
        self.tried = float(self.values[2, 0])

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has values of its own, and their address."""
        return _restored, (self._most, self.values)

    @property
    def known(self) -> bool:
        """Whether there were a few trees."""
        return self.tried >= OTHERS

    @property
    def past(self) -> float:
        """What the past weighs against the next tree."""
        met = min(self.tried, self._most)
        return met / (met + 1)

    def count(self) -> None:
        """A tree was added where the values lie."""
        self.values[2] += 1
        self.tried += 1

    def add(self, worth: np.ndarray) -> None:
        """A tree's guesses are worth [n], falling."""
        found = np.zeros((2, AHEAD))
        found[:, : len(worth)] = worth[:AHEAD], np.ones(min(len(worth), AHEAD))
        past = self.past
        self.values[:2] = past * self.values[:2] + (1 - past) * found
        self.count()

    def learn(self, right: Sequence[int], trees: Sequence[int], weight: float = 1.0) -> None:
        """Steps with some guesses each were taken.

        Args:
            right: [n + 1], in how many of them node i of the tree was walked, the root the first.
            trees: [n + 1], how many had i guesses.
            weight: of each of the steps against a tree.
        """
        worth, there, met = self.values
        steps, size = sum(trees), min(len(right) - 1, AHEAD)
        held = HELD if worth[0] > 0 else 0.0
        share = weight * steps / (np.minimum(met[:size], self._most) + held + weight * steps)
        before = float(worth[:size].sum())
        worth[:size] += share * (np.array(right[1 : size + 1]) / steps - worth[:size])
        there[:size] += share * (np.cumsum(trees[:0:-1])[::-1][:size] / steps - there[:size])
        met[:size] += weight * steps
        self.tried += weight * steps
        # Guesses further on were not tried; what is known of the first ones goes for them as well.
        more = min(float(worth[:size].sum()) / before, MOST_MORE) if before > 0 else 1.0
        np.minimum(worth[size:] * more, SUREST * there[size:], out=worth[size:])
        tried = int((met > 0).sum())
        if 0 < tried < AHEAD:  # as it fell from the first guess to the last that ever was, it may go on
            fall = (worth[tried - 1] / worth[0]) ** (1 / max(tried - 1, 1)) if worth[0] > 0 else LEAST_FALL
            worth[tried:] = worth[tried - 1] * min(max(fall, LEAST_FALL), MOST_FALL) ** np.arange(1, AHEAD - tried + 1)
            there[tried:] = there[tried - 1]

    def rows(self, size: int) -> float:
        """Guesses that a tree has on the average where `size` are asked for."""
        return sum(self.values[1, :size].tolist())


class CompiledAverage(Average):
    """The same, which learns in one call."""

    __slots__ = ()

    def learn(self, right: Sequence[int], trees: Sequence[int], weight: float = 1.0) -> None:
        """See `Average.learn`."""
        compiled = library()
        assert compiled is not None
        whole = c_int64 * len(right)
        compiled.counts_walked(self.at, self._most, whole(*right), whole(*trees), len(right) - 1, weight)
        self.tried += weight * sum(trees)


def new_average(habit: float, usual: Average | None = None) -> Average:
    """See `Average`; compiled where that can be."""
    return (Average if library() is None else CompiledAverage)(habit, usual)


def _restored(most: float, values: np.ndarray) -> Average:
    average = new_average(0.5)
    average._most = most
    average.values[:] = values
    average.tried = float(values[2, 0])
    return average
