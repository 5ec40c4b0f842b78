"""Counts of guesses that came true, and what they say of a tree: in numpy, and compiled for the step's hot path.

`Counts` is the plain form. `CompiledCounts` does the same for one tree in a call each (`_counts.c`): every drafted step
weighs its tree, and on a CPU the dozen array operations of the plain form take longer than a few rows of a small model.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftree.tree import TokenTree

LIBRARY = Path(__file__).with_name("_counts.so")
ABI = 1
BINS = 24
PER_FACTOR = 4  # bins to a factor of e; the last one holds all that is below
KIND_LEAST = (-0.5, -1.2)  # log-probability of the best guess above which a tree is good, or middling
KINDS = len(KIND_LEAST) + 1
FORGET = 0.99  # weight of the past at each tree that adds to a bin
PRIOR = 10.0  # how many trees the drafter's own probability counts for
SUREST = 0.999  # no guess counts as surer


class Drafted(NamedTuple):
    """A tree whose text is still to come: number `b` of `trees` (on the host), and the position behind its root."""

    position: int
    trees: TokenTree
    b: int


class Lesson(NamedTuple):
    """How many of a tree's guesses were right, and how many the rates had expected to be."""

    expected: float
    found: int


class Counts:
    """How many guesses were seen, and how many of them right, by kind of tree and bin of probability.

    Attributes:
        rates: [KINDS, BINS], share of right guesses, never rising from bin to bin: trees are cut in the drafter's
            order.
    """

    def __init__(self) -> None:
        centre = np.exp(-(np.arange(BINS) + 0.5) / PER_FACTOR)
        self.right = np.tile(PRIOR * centre, (KINDS, 1))
        self.seen = np.full((KINDS, BINS), PRIOR)
        self.rates = np.empty((KINDS, BINS))
        self.read()

    def read(self) -> None:
        """Let the rates know of what was counted."""
        for kind in range(KINDS):
            self.rates[kind] = _falling(self.right[kind], self.seen[kind])

    def worth(self, logp: np.ndarray, trust: float) -> np.ndarray:
        """[n], probability that guesses of these log-probabilities [n] are walked; together they are a tree's."""
        worth: np.ndarray = np.minimum(self.rates[_kind(logp)].take(_bins(logp)) * trust, SUREST)
        return worth

    def weigh(self, tree: TokenTree, trust: float, seconds: np.ndarray) -> tuple[int, float] | None:
        """How many guesses of a batch of one, taken in their order, pay most, and tokens of a step with them.

        None where they are not in falling order of probability, or not here.

        Args:
            tree: of one request.
            trust: what the rates are to be multiplied with.
            seconds: of steps with one row, two, and so on to all nodes and more.
        """
        logp = tree.logp.numpy(force=True)[0, : tree.sizes[0]]
        if (logp[1:] > logp[:-1]).any():
            return None
        gain = np.ones(len(logp))
        gain[1:] = self.worth(logp[1:], trust) if len(logp) > 1 else 0.0
        gain = gain.cumsum()
        size = int((gain / seconds[: len(gain)]).argmax())
        return size, float(gain[size])

    def learn(self, drafted: Drafted, text: list[int], *, ended: bool = False) -> Lesson | None:
        """Count a tree's guesses; None where more text may confirm more.

        Args:
            drafted: the tree.
            text: all of the request's tokens.
            ended: no more will come; what lies beyond its end is not counted.
        """
        b, size = drafted.b, drafted.trees.sizes[drafted.b]
        tokens, parents, logp = (
            part[b, :size].numpy() for part in (drafted.trees.tokens, drafted.trees.parents, drafted.trees.logp)
        )
        right, below, depth = np.zeros(size, bool), parents == 0, np.zeros(size, int)
        for node in range(1, size):
            depth[node] = depth[parents[node]] + 1
        for token in text[drafted.position :]:
            reached = below & (tokens == token)
            right |= reached
            below = reached[parents]
            below[0] = False  # the root's parent, -1, reads the last node
        if below.any() and not ended:
            return None
        counted = depth > 0
        if ended:
            counted &= depth <= len(text) - drafted.position
        kind, bins = _kind(logp[1:]), _bins(logp[counted])
        seen = np.bincount(bins, minlength=BINS)
        lesson = Lesson(float(self.rates[kind] @ seen), int(right.sum()))
        keep = np.where(seen > 0, FORGET, 1.0)
        self.seen[kind] = keep * self.seen[kind] + seen
        self.right[kind] = keep * self.right[kind] + np.bincount(_bins(logp[right]), minlength=BINS)
        return lesson


class CompiledCounts(Counts):
    """The same; trees in other memory than the host's, and too large ones, go the plain way."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._weigh, self._learn = library.counts_weigh, library.counts_learn
        self._of_rates, self._of_right, self._of_seen = (a.ctypes.data for a in (self.rates, self.right, self.seen))
        self._table: np.ndarray | None = None  # met last, and where it is
        self._at = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has arrays of its own, and calls with their addresses."""
        return _restored, (self.right, self.seen, self.rates)

    def weigh(self, tree: TokenTree, trust: float, seconds: np.ndarray) -> tuple[int, float] | None:
        """See `Counts.weigh`."""
        logp = tree.logp
        if not logp.is_cpu:
            return super().weigh(tree, trust, seconds)
        if seconds is not self._table:  # its address takes longer to ask for than all the rest
            self._table, self._at = seconds, seconds.ctypes.data
        gain = c_double()
        size = self._weigh(logp.data_ptr(), tree.sizes[0], self._of_rates, trust, self._at, byref(gain))
        return None if size < 0 else (size, gain.value)

    def learn(self, drafted: Drafted, text: list[int], *, ended: bool = False) -> Lesson | None:
        """See `Counts.learn`."""
        position, trees, b = drafted
        came = text[position:]
        at = [part.data_ptr() + b * part.stride(0) * part.element_size() for part in (trees.logp, trees.tokens)]
        at.append(trees.parents.data_ptr() + b * trees.parents.stride(0) * 8)
        expected = c_double()
        size, ids, counts = (
            trees.sizes[b],
            (c_int64 * len(came))(*came),
            (self._of_rates, self._of_right, self._of_seen),
        )
        found = self._learn(*at, size, ids, len(came), ended, *counts, byref(expected))
        if found == -2:
            return super().learn(drafted, text, ended=ended)
        return None if found < 0 else Lesson(expected.value, found)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The compiled twin, ready for calls; None when it was not built, is stale or does not load."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.counts_abi.restype = c_int64
        if library.counts_abi() != ABI * 10000 + BINS * 100 + KINDS:
            return None
    except (OSError, AttributeError):
        return None
    library.counts_weigh.restype = library.counts_learn.restype = c_int64
    library.counts_weigh.argtypes = [c_void_p, c_int64, c_void_p, c_double, c_void_p, c_void_p]
    library.counts_learn.argtypes = [*[c_void_p] * 3, c_int64, c_void_p, c_int64, c_int, *[c_void_p] * 4]
    return library


def new_counts() -> Counts:
    """Empty ones, compiled where that can be."""
    library = _library()
    return Counts() if library is None else CompiledCounts(library)


def _restored(right: np.ndarray, seen: np.ndarray, rates: np.ndarray) -> Counts:
    counts = new_counts()
    counts.right[:], counts.seen[:], counts.rates[:] = right, seen, rates
    return counts


def _falling(right: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """right / seen by bin; neighbours that rise are pooled, so that a bin known well outweighs an empty one."""
    pools: list[tuple[float, float, int]] = []  # right, seen, bins
    for r, n in zip(right.tolist(), seen.tolist(), strict=True):
        bins = 1
        while pools and pools[-1][0] * n < r * pools[-1][1]:
            last = pools.pop()
            r, n, bins = r + last[0], n + last[1], bins + last[2]
        pools.append((r, n, bins))
    return np.repeat([r / n for r, n, _ in pools], [bins for *_, bins in pools])


def _kind(logp: np.ndarray) -> int:
    """Which kind of tree has guesses [n] of these log-probabilities: by its best guess."""
    best = float(logp.max())
    return next((kind for kind, least in enumerate(KIND_LEAST) if best > least), KINDS - 1)


def _bins(logp: np.ndarray) -> np.ndarray:
    return np.minimum(-PER_FACTOR * logp, BINS - 1).astype(np.intp)
