"""Counts of guesses that came true, and what they say of a tree: in numpy, and compiled for the step's hot path.

`Counts` is the plain form. `CompiledCounts` plans a step, and learns from a tree, in a call each (`_counts.c`): on a
CPU the dozens of array operations of the plain form take longer than many rows of a small model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_double, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from draftree.shaping.cells import PER_FACTOR, SUREST, bins_of, cells_of
from draftree.shaping.compiled import BINS, KINDS, address_of, library
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.shaping.average import Average

KIND_LEAST = (-0.5, -1.2)  # log-probability of the best guess above which a tree is good, or middling
FORGET = 0.99  # weight of the past at each tree that adds to a bin
PRIOR = 10.0  # how many trees the drafter's own probability counts for


class Drafted(NamedTuple):
    """A tree whose text is still to come: number `b` of `trees` (on the CPU), and the position behind its root."""

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
        worth: np.ndarray = np.minimum(self.rates[_kind(logp)].take(bins_of(logp)) * trust, SUREST)
        return worth

    def plan(
        self,
        trees: TokenTree,
        trust: Sequence[float],
        averages: Sequence[Average | None],
        seconds: np.ndarray,
        *,
        packed: bool,
    ) -> Sizes | None:
        """Sizes for this step, whose trees the averages learn of.

        Guesses are taken in their trees' order. None where they are not in falling order of probability, or not here.

        Args:
            trees: of the step.
            trust: [B], what the rates are to be multiplied with.
            averages: of each request. None where one takes no part in later steps.
            seconds: of steps with one row, two, and so on to all nodes.
            packed: whether only real rows cost, and not the padding of smaller trees.
        """
        logp = trees.logp.numpy(force=True)
        worth = []
        for b, size in enumerate(trees.sizes):
            of = logp[b, :size]
            if (of[1:] > of[:-1]).any():
                return None
            worth.append(self.worth(of[1:], trust[b]) if size > 1 else np.zeros(0))
        now = _choose(worth, seconds, packed=packed)
        for b, (average, found) in enumerate(zip(averages, worth, strict=True)):
            if average is not None:
                average.add(found, cells_of(logp[b, 1 : trees.sizes[b]]))
        return Sizes(now, [1.0 + float(of[:size].sum()) for of, size in zip(worth, now, strict=True)])

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
        kind, bins = _kind(logp[1:]), bins_of(logp[counted])
        seen = np.bincount(bins, minlength=BINS)
        lesson = Lesson(float(self.rates[kind] @ seen), int(right.sum()))
        keep = np.where(seen > 0, FORGET, 1.0)
        self.seen[kind] = keep * self.seen[kind] + seen
        self.right[kind] = keep * self.right[kind] + np.bincount(bins_of(logp[right]), minlength=BINS)
        return lesson


class CompiledCounts(Counts):
    """The same; trees in other memory than the CPU's, and too large ones, go the plain way."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._plan = library.counts_plan
        self._learn, self._read = library.counts_learn, library.counts_read
        self._of_rates, self._of_right, self._of_seen = (a.ctypes.data for a in (self.rates, self.right, self.seen))

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
        *,
        packed: bool,
    ) -> Sizes | None:
        """See `Counts.plan`."""
        logp, batch = trees.logp, len(trees.sizes)
        if not logp.is_cpu or not logp.is_contiguous():
            return super().plan(trees, trust, averages, seconds, packed=packed)
        whole, real = c_int64 * batch, c_double * batch
        now, gains = whole(), real()
        at = (c_void_p * batch)(*[None if average is None else average.at for average in averages])
        habits = real(*[0.0 if average is None else average.past for average in averages])
        told = self._plan(
            *(logp.data_ptr(), logp.shape[1], batch, whole(*trees.sizes), self._of_rates, real(*trust), at),
            *(habits, address_of(seconds), packed, now, gains),
        )
        if told == -2:
            return super().plan(trees, trust, averages, seconds, packed=packed)
        if told:
            return None
        for average in averages:
            if average is not None:
                average.count()
        return Sizes(now[:], gains[:])

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


def new_counts() -> Counts:
    """Empty ones, compiled where that can be."""
    compiled = library()
    return Counts() if compiled is None else CompiledCounts(compiled)


def _restored(right: np.ndarray, seen: np.ndarray, rates: np.ndarray) -> Counts:
    counts = new_counts()
    counts.right[:], counts.seen[:], counts.rates[:] = right, seen, rates
    return counts


def _choose(worth: Sequence[np.ndarray], seconds: np.ndarray, *, packed: bool) -> list[int]:
    """How many guesses of each request bring most tokens a second.

    Args:
        worth: of each request [n], tokens that its guesses bring.
        seconds: of steps with one row, two, and so on.
        packed: whether only real rows cost; else all trees are as wide as the widest.
    """
    batch, counts = len(worth), [len(of) for of in worth]
    best, sizes = batch / seconds[batch - 1], [0] * batch
    gain, taken, heads = float(batch), batch, [0] * batch
    while packed:
        likely = [float(of[head]) if head < len(of) else 0.0 for of, head in zip(worth, heads, strict=True)]
        b = int(np.argmax(likely))
        if likely[b] <= 0:
            return sizes
        gain, taken = gain + likely[b], taken + 1
        heads[b] += 1
        pace = gain / float(seconds[taken - 1])
        if pace > best:
            best, sizes = pace, list(heads)
    width = 0
    for w in range(max(counts)):
        gain += sum(float(of[w]) for of in worth if w < len(of))
        pace = gain / float(seconds[batch * (w + 2) - 1])
        if pace > best:
            best, width = pace, w + 1
    return [min(count, width) for count in counts]


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
