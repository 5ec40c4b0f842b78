"""What guesses bring on the average, by their place in the tree and the drafter's own log-probability of them.

Trees that are weighed tell it, and so do steps that are not planned, by the nodes that were walked in them. The
drafter's probabilities only sort guesses into cells; what those of a cell are worth is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch

from draftree.shaping.cells import PER_FACTOR, SUREST, cells_of
from draftree.shaping.compiled import CELLS, LEVELS, PARTS, library
from draftree.tree import TokenTree

KNOWN = 4  # steps after which something is known
OTHERS = 8  # steps that what is known of other requests counts for
OVERSURE = 1.5  # power of the drafter's probabilities that guesses hold with, before anything is known
FARTHER = (1.0, 0.8, 0.6)  # times that, in each part of a tree
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
        self.tried: float = 0.0 if usual is None else min(usual.tried, OTHERS)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has values of its own, and their address."""
        return _restored, (self._most, self.values, self.tried)

    @property
    def known(self) -> bool:
        """Whether there were a few steps."""
        return self.tried >= KNOWN

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

    def learn(
        self, right: np.ndarray, there: np.ndarray, steps: int, tried: Sequence[int], weight: float = 1.0
    ) -> None:
        """So many steps were taken.

        Args:
            right: [CELLS], guesses of each that were walked in them.
            there: [CELLS], guesses.
            steps: how many.
            tried: bins of each part that guesses were to be of.
            weight: of each of the steps against one of the past.
        """
        worth, count, met = self.values
        looked = (np.arange(LEVELS) < np.array(tried)[:, None]).ravel()
        share = weight * steps / (np.minimum(met, self._most) + np.where(met > 0, HELD, 0.0) + weight * steps)
        before = float(worth[looked].sum())
        worth += np.where(looked, share * (right / steps - worth), 0.0)
        count += np.where(looked, share * (there / steps - count), 0.0)
        met[looked] += weight * steps
        # Other guesses were not tried; what is known of these goes for them as well.
        more = min(float(worth[looked].sum()) / before, MOST_MORE) if before > 0 else 1.0
        worth[~looked] = np.minimum(worth * more, SUREST * count)[~looked]


class Taken(NamedTuple):
    """Steps of a batch that were taken.

    Attributes:
        walks: nodes that were walked in each tree, the root among them, of steps in which there were guesses.
        trees: of those steps, each [B, n].
        steps: all of them.
        tried: [B], bins of each part that guesses were to be of.
    """

    walks: Sequence[Sequence[Sequence[int]]]
    trees: Sequence[TokenTree]
    steps: int
    tried: Sequence[Sequence[int]]


def learn_steps(averages: Sequence[Average | None], usual: Average, taken: Taken, weight: float) -> None:
    """Let requests learn from their steps, and what is usual with them.

    Args:
        averages: [B], None where nothing is to be learned.
        usual: what a new request is taken for.
        taken: the steps.
        weight: of each step in what is usual.
    """
    for average in averages:
        if average is not None:
            average.tried += taken.steps
            usual.tried += weight * taken.steps
    compiled = library()
    if compiled is not None and _learned(compiled, averages, usual, taken, weight):
        return
    for b, average in enumerate(averages):
        if average is None:
            continue
        right, there = np.zeros(CELLS), np.zeros(CELLS)
        for walk, tree in zip(taken.walks, taken.trees, strict=True):
            cells = cells_of(tree.logp[b, 1 : tree.sizes[b]].numpy(force=True))
            np.add.at(there, cells, 1)
            np.add.at(right, cells[[node - 1 for node in walk[b] if node]], 1)
        average.learn(right, there, taken.steps, taken.tried[b])
        usual.learn(right, there, taken.steps, taken.tried[b], weight)


def _learned(compiled: CDLL, averages: Sequence[Average | None], usual: Average, taken: Taken, weight: float) -> bool:
    """The same in one call; False for trees that lie elsewhere or otherwise, and for too many requests."""
    logps = [tree.logp for tree in taken.trees]
    if not all(logp.is_contiguous() for logp in logps) or (
        logps and not (logps[0].is_cpu and logps[0].dtype == torch.float32)
    ):
        return False
    met, batch = len(logps), len(averages)
    each, every = c_int64 * met, c_int64 * (met * batch)
    walked = [walk for of in taken.walks for walk in of]
    nodes = [node for walk in walked for node in walk]
    most = next((average._most for average in averages if average is not None), 0.0)
    return not compiled.counts_course(
        (c_void_p * met)(*[logp.data_ptr() for logp in logps]),
        each(*[logp.shape[1] for logp in logps]) if batch > 1 else None,
        every(*[size for tree in taken.trees for size in tree.sizes]),
        every(*map(len, walked)),
        (c_int64 * len(nodes))(*nodes),
        met,
        taken.steps,
        batch,
        (c_void_p * batch)(*[None if average is None else average.at for average in averages]),
        most,
        usual.at,
        usual._most,
        (c_int64 * (batch * PARTS))(*[level for levels in taken.tried for level in levels]),
        weight,
    )


def _new() -> np.ndarray:
    """What is known if nothing is: most drafters are too sure of themselves, and more so of what lies far down."""
    likely = np.exp(-OVERSURE * (np.arange(LEVELS) + 0.5) / PER_FACTOR)
    return np.stack([FEW * np.outer(FARTHER, likely).ravel(), np.full(CELLS, FEW), np.full(CELLS, PRIOR)])


def _restored(most: float, values: np.ndarray, tried: float) -> Average:
    average = Average(0.5)
    average._most, average.tried = most, tried
    average.values[:] = values
    return average
