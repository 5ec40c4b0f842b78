"""Counts of guesses that came true, and what they say of a tree: in numpy, and compiled for the step's hot path.

`Counts` is the plain form. `CompiledCounts` plans a step, and learns from a tree, in a call each (`_counts.c`): on a
CPU the dozens of array operations of the plain form take longer than many rows of a small model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.shaping.average import Average

LIBRARY = Path(__file__).with_name("_counts.so")
ABI = 4
AHEAD = 24  # most guesses of a tree in a step that is not planned
RARE = 1e-3  # of the trees: guesses beyond those that are there so often are not asked for
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


class Sizes(NamedTuple):
    """Guesses of each request, and the tokens that a step is expected to bring it."""

    sizes: list[int]
    gains: list[float]


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
        Counts.read(self)

    def read(self) -> None:
        """Let the rates know of what was counted."""
        for kind in range(KINDS):
            self.rates[kind] = _falling(self.right[kind], self.seen[kind])

    def worth(self, logp: np.ndarray, trust: float) -> np.ndarray:
        """[n], probability that guesses of these log-probabilities [n] are walked; together they are a tree's."""
        worth: np.ndarray = np.minimum(self.rates[_kind(logp)].take(_bins(logp)) * trust, SUREST)
        return worth

    def plan(
        self,
        trees: TokenTree,
        trust: Sequence[float],
        averages: Sequence[Average | None],
        seconds: np.ndarray,
        aside: float,
        *,
        packed: bool,
    ) -> tuple[Sizes, Sizes] | None:
        """Sizes for this step, and for the steps after it, where its trees are taken for average ones.

        Guesses are taken in their trees' order. None where they are not in falling order of probability, or not here.

        Args:
            trees: of the step.
            trust: [B], what the rates are to be multiplied with.
            averages: of each request, which learn of this step's tree. None where one takes no part in later steps.
            seconds: of steps with one row, two, and so on to all nodes, and to AHEAD guesses of each request.
            aside: seconds that each of the steps to come takes beside its rows, where it has more than roots.
            packed: whether only real rows cost, and not the padding of smaller trees.
        """
        logp = trees.logp.numpy(force=True)
        worth = []
        for b, size in enumerate(trees.sizes):
            of = logp[b, :size]
            if (of[1:] > of[:-1]).any():
                return None
            worth.append(self.worth(of[1:], trust[b]) if size > 1 else np.zeros(0))
        now = _choose(worth, [np.ones(len(of)) for of in worth], seconds, packed=packed)
        for average, found in zip(averages, worth, strict=True):
            if average is not None:
                average.add(found)
        return now, self.ahead(averages, seconds, aside, packed=packed)

    def ahead(self, averages: Sequence[Average | None], seconds: np.ndarray, aside: float, *, packed: bool) -> Sizes:
        """Sizes for steps whose trees are taken for average ones; arguments as in `plan`."""
        ahead = [np.zeros((2, 0)) if average is None else average.values for average in averages]
        ahead = [of[:, : int((of[1] > RARE).argmin()) if (of[1] <= RARE).any() else AHEAD] for of in ahead]
        return _choose([of[0] for of in ahead], [of[1] for of in ahead], seconds + aside, packed=packed)

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
        self._plan, self._ahead = library.counts_plan, library.counts_ahead
        self._learn, self._read = library.counts_learn, library.counts_read
        self._of_rates, self._of_right, self._of_seen = (a.ctypes.data for a in (self.rates, self.right, self.seen))
        self._table: np.ndarray | None = None  # met last, and where it is
        self._at = 0

    def read(self) -> None:
        """See `Counts.read`."""
        self._read(self._of_right, self._of_seen, self._of_rates)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has arrays of its own, and calls with their addresses."""
        return _restored, (self.right, self.seen, self.rates)

    def plan(
        self,
        trees: TokenTree,
        trust: Sequence[float],
        averages: Sequence[Average | None],
        seconds: np.ndarray,
        aside: float,
        *,
        packed: bool,
    ) -> tuple[Sizes, Sizes] | None:
        """See `Counts.plan`."""
        logp, batch = trees.logp, len(trees.sizes)
        if not logp.is_cpu or not logp.is_contiguous():
            return super().plan(trees, trust, averages, seconds, aside, packed=packed)
        whole, real = c_int64 * batch, c_double * batch
        now, later, now_gains, later_gains = whole(), whole(), real(), real()
        at = (c_void_p * batch)(*[None if average is None else average.at for average in averages])
        habits = real(*[0.0 if average is None else average.past for average in averages])
        told = self._plan(
            *(logp.data_ptr(), logp.shape[1], batch, whole(*trees.sizes), self._of_rates, real(*trust), at),
            *(habits, self._address(seconds), aside, packed, now, now_gains, later, later_gains),
        )
        if told == -2:
            return super().plan(trees, trust, averages, seconds, aside, packed=packed)
        if told:
            return None
        for average in averages:
            if average is not None:
                average.count()
        return Sizes(now[:], now_gains[:]), Sizes(later[:], later_gains[:])

    def ahead(self, averages: Sequence[Average | None], seconds: np.ndarray, aside: float, *, packed: bool) -> Sizes:
        """See `Counts.ahead`."""
        batch = len(averages)
        sizes, gains = (c_int64 * batch)(), (c_double * batch)()
        at = (c_void_p * batch)(*[None if average is None else average.at for average in averages])
        if self._ahead(at, batch, self._address(seconds), aside, packed, sizes, gains):
            return super().ahead(averages, seconds, aside, packed=packed)
        return Sizes(sizes[:], gains[:])

    def _address(self, seconds: np.ndarray) -> int:
        if seconds is not self._table:  # its address takes longer to ask for than a plan
            self._table, self._at = seconds, seconds.ctypes.data
        return self._at

    def learn(self, drafted: Drafted, text: list[int], *, ended: bool = False) -> Lesson | None:
        """See `Counts.learn`."""
        position, trees, b = drafted
        came = text[position:]
        logp, tokens, parents = trees.logp, trees.tokens, trees.parents
        at, ids_at, above_at = logp.data_ptr(), tokens.data_ptr(), parents.data_ptr()
        if b:
            at += b * logp.stride(0) * logp.element_size()
            ids_at += b * tokens.stride(0) * tokens.element_size()
            above_at += b * parents.stride(0) * parents.element_size()
        expected = c_double()
        found = self._learn(
            *(at, ids_at, above_at, trees.sizes[b], (c_int64 * len(came))(*came), len(came), ended),
            *(self._of_rates, self._of_right, self._of_seen, byref(expected)),
        )
        if found == -2:
            return super().learn(drafted, text, ended=ended)
        return None if found < 0 else Lesson(expected.value, found)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled twin, ready for calls; None when it was not built, is stale or does not load."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.counts_abi.restype = c_int64
        if library.counts_abi() != ABI * 1000000 + AHEAD * 10000 + BINS * 100 + KINDS:
            return None
    except (OSError, AttributeError):
        return None
    library.counts_plan.restype = library.counts_ahead.restype = library.counts_learn.restype = c_int64
    library.counts_walked.restype = None
    library.counts_walked.argtypes = [c_void_p, c_double, c_void_p, c_void_p, c_int64, c_double]
    library.counts_read.restype, library.counts_read.argtypes = None, [c_void_p] * 3
    pointers: list[Any] = [c_void_p] * 4
    library.counts_plan.argtypes = [
        *(c_void_p, c_int64, c_int64, *pointers),
        *(c_void_p, c_void_p, c_double, c_int, *pointers),
    ]
    library.counts_ahead.argtypes = [c_void_p, c_int64, c_void_p, c_double, c_int, c_void_p, c_void_p]
    library.counts_learn.argtypes = [*[c_void_p] * 3, c_int64, c_void_p, c_int64, c_int, *[c_void_p] * 4]
    return library


def new_counts() -> Counts:
    """Empty ones, compiled where that can be."""
    compiled = library()
    return Counts() if compiled is None else CompiledCounts(compiled)


def _restored(right: np.ndarray, seen: np.ndarray, rates: np.ndarray) -> Counts:
    counts = new_counts()
    counts.right[:], counts.seen[:], counts.rates[:] = right, seen, rates
    return counts


def _choose(worth: Sequence[np.ndarray], rows: Sequence[np.ndarray], seconds: np.ndarray, *, packed: bool) -> Sizes:
    """The sizes that bring most tokens a second.

    Args:
        worth: of each request [n], tokens that its guesses bring.
        rows: alike, rows that they take; one each where they are not packed.
        seconds: of steps with one row, two, and so on.
        packed: whether only real rows cost.
    """
    batch, counts = len(worth), [len(of) for of in worth]
    best, sizes = batch / seconds[batch - 1], [0] * batch
    if packed:
        heads, gain, taken = [0] * batch, float(batch), float(batch)
        while True:
            density = [w[h] / r[h] if h < len(w) else 0.0 for w, r, h in zip(worth, rows, heads, strict=True)]
            b = int(np.argmax(density))
            if density[b] <= 0:
                break
            gain, taken = gain + worth[b][heads[b]], taken + rows[b][heads[b]]
            heads[b] += 1
            pace = gain / np.interp(taken, np.arange(1, 1 + len(seconds)), seconds)
            if pace > best:
                best, sizes = pace, list(heads)
    else:
        padded = np.zeros((batch, max(counts)))
        for b, of in enumerate(worth):
            padded[b, : len(of)] = of
        width = 0
        for w, gain in enumerate(batch + padded.sum(0).cumsum(), start=1):
            pace = gain / seconds[batch * (w + 1) - 1]
            if pace > best:
                best, width = pace, w
        sizes = [min(count, width) for count in counts]
    return Sizes(sizes, [1.0 + float(of[:size].sum()) for of, size in zip(worth, sizes, strict=True)])


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
