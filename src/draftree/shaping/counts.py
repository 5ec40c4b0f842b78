"""Counts of guesses that came true, and what they say of a tree: in numpy, and compiled for the step's hot path.

`Counts` is the plain form. `CompiledCounts` plans a step, and learns from a tree, in a call each (`_counts.c`): on a
CPU the dozens of array operations of the plain form take longer than many rows of a small model.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import byref, c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from draftree.drafting.base import LEAST_ENDS
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.shaping.average import Average

LIBRARY = Path(__file__).with_name("_counts.so")
ABI = 5
AHEAD = 24  # most guesses of a tree in a step that is not planned
RARE = 1e-3  # guesses a step: cells with fewer cost nothing
PARTS = len(LEAST_ENDS) + 1
LEVELS = 12  # bins of each part; the last one holds all that is below
CELLS = PARTS * LEVELS
FAR = 12  # guesses of a tree that has such of the last part
BINS = 24  # of log-probabilities, the highest first
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


class Reach(NamedTuple):
    """Which guesses each request is to have.

    Attributes:
        levels: of how many bins, in each part of its trees; 0 for none. Never more than in the part before.
        gains: tokens expected with them.
        guesses: how many they are expected to be.
        seconds: time of such a step.
    """

    levels: list[tuple[int, ...]]
    gains: list[float]
    guesses: list[float]
    seconds: float


def cells_of(logp: np.ndarray) -> np.ndarray:
    """[n], the cells of a tree's guesses of log-probabilities [n], in their order."""
    parts = np.searchsorted(LEAST_ENDS, np.arange(len(logp)), side="right")
    return parts * LEVELS + np.minimum(_bins(logp), LEVELS - 1)


def least_of(levels: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities that guesses of so many bins are above, for each part of a tree."""
    return tuple([-level / PER_FACTOR if level < LEVELS else -math.inf for level in levels])


def wanted(logp: np.ndarray, least: Sequence[float]) -> int:
    """How many of a tree's guesses of log-probabilities [n], the likeliest first, are above what their part asks."""
    above = [int((logp > floor).sum()) for floor in least]
    return max(*(min(count, end) for count, end in zip(above, LEAST_ENDS, strict=False)), above[-1])


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
        logp, batch = trees.logp.numpy(force=True), trees.batch
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

    def ahead(self, averages: Sequence[Average | None], seconds: np.ndarray, aside: float, *, packed: bool) -> Reach:
        """Which guesses to have in steps that no plan goes before, whose trees are taken for average ones.

        Args:
            averages: of each request; None where one takes no part.
            seconds: of steps with one row, two, and so on to AHEAD guesses of each request.
            aside: seconds that each of them takes beside its rows.
            packed: as for `plan`.
        """
        none = np.zeros((2, PARTS, LEVELS))
        values = [none if of is None else of.values[:2].reshape(2, PARTS, LEVELS) for of in averages]
        levels, took = (_reached if packed else _padded)(values, seconds + aside)
        least = [np.minimum.accumulate(levels[b : b + PARTS]).tolist() for b in range(0, len(levels), PARTS)]
        gains, guesses = (
            [
                sum(float(of[i][part, :level].sum()) for part, level in enumerate(own))
                for of, own in zip(values, least, strict=True)
            ]
            for i in range(2)
        )
        return Reach([tuple(own) for own in least], [1.0 + gain for gain in gains], guesses, took)

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
            *(habits, self._address(seconds), packed, now, gains),
        )
        if told == -2:
            return super().plan(trees, trust, averages, seconds, packed=packed)
        if told:
            return None
        for average in averages:
            if average is not None:
                average.count()
        return Sizes(now[:], gains[:])

    def ahead(self, averages: Sequence[Average | None], seconds: np.ndarray, aside: float, *, packed: bool) -> Reach:
        """See `Counts.ahead`."""
        batch = len(averages)
        real = c_double * batch
        levels, gains, guesses, took = (c_int64 * (batch * PARTS))(), real(), real(), c_double()
        at = (c_void_p * batch)(*[None if average is None else average.at for average in averages])
        if self._ahead(at, batch, self._address(seconds), aside, packed, levels, gains, guesses, byref(took)):
            return super().ahead(averages, seconds, aside, packed=packed)
        flat = levels[:]
        own = [tuple(flat[b : b + PARTS]) for b in range(0, len(flat), PARTS)]
        return Reach(own, gains[:], guesses[:], took.value)

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
        if library.counts_abi() != ABI * 10000000 + CELLS * 100000 + AHEAD * 1000 + BINS * 10 + KINDS:
            return None
    except (OSError, AttributeError):
        return None
    library.counts_plan.restype = library.counts_ahead.restype = library.counts_learn.restype = c_int64
    library.counts_course.restype = c_int64
    library.counts_course.argtypes = [
        *[c_void_p] * 5,
        *[c_int64] * 3,
        *(c_void_p, c_double, c_void_p, c_double, c_void_p, c_double),
    ]
    library.counts_read.restype, library.counts_read.argtypes = None, [c_void_p] * 3
    pointers: list[Any] = [c_void_p] * 4
    library.counts_plan.argtypes = [
        *(c_void_p, c_int64, c_int64, *pointers),
        *(c_void_p, c_void_p, c_int, c_void_p, c_void_p),
    ]
    library.counts_ahead.argtypes = [c_void_p, c_int64, c_void_p, c_double, c_int, *[c_void_p] * 4]
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


def _reached(values: Sequence[np.ndarray], seconds: np.ndarray) -> tuple[list[int], float]:
    """Levels of all requests' parts for most tokens a second, and seconds of such a step; values [2, PARTS, LEVELS]."""
    batch = len(values)
    blocks = [_pooled(of[0, part], of[1, part]) for of in values for part in range(PARTS)]
    gain = taken = float(batch)
    took = cost = float(seconds[batch - 1])
    best, levels, heads = gain / cost, [0] * len(blocks), [0] * len(blocks)
    while True:
        others = (taken - batch) * (batch - 1) / batch
        prices = [_price(seconds, part, batch, others) for part in range(PARTS)]
        found = [0.0] * len(blocks)
        for q, (worth, rows, _) in enumerate(blocks):
            if heads[q] < len(worth) and rows[heads[q]] > RARE:
                dear = prices[q % PARTS] if prices[q % PARTS] > 0 else 1e-12
                found[q] = worth[heads[q]] / (rows[heads[q]] * dear)
        q = int(np.argmax(found))
        if found[q] <= 0:
            break
        worth, rows, _ = blocks[q]
        gain, taken = gain + worth[heads[q]], taken + rows[heads[q]]
        cost += rows[heads[q]] * prices[q % PARTS]
        heads[q] += 1
        if taken > batch * AHEAD // 2:
            break
        if gain / cost > best:
            best, took = gain / cost, cost
            levels = [sum(lengths[:head]) for (_, _, lengths), head in zip(blocks, heads, strict=True)]
    return levels, took


def _price(seconds: np.ndarray, part: int, batch: int, others: float) -> float:
    """Seconds of one more row where a guess of this part is verified.

    That is behind those that a tree has before it, and such rows as the other requests have on the average. Most trees
    are small and some large, so that a row of the average number would be too cheap.
    """
    ends = (0, *LEAST_ENDS, FAR)
    before, behind = (_at(seconds, batch + others + end) for end in ends[part : part + 2])
    return (behind - before) / (ends[part + 1] - ends[part])


def _padded(values: Sequence[np.ndarray], seconds: np.ndarray) -> tuple[list[int], float]:
    """The same where every tree is as wide as the widest: all requests and parts go as far."""
    batch, far = len(values), 0
    gain = taken = float(batch)
    took = float(seconds[batch - 1])
    best = gain / took
    for w in range(LEVELS):
        gain += sum(float(of[0, :, w].sum()) for of in values)
        taken += batch * max(float(of[1, :, w].sum()) for of in values)
        if taken > batch * (AHEAD + 1):
            break
        cost = _at(seconds, taken)
        if gain / cost > best:
            best, took, far = gain / cost, cost, w + 1
    return [far * bool(of.any()) for of in values for _ in range(PARTS)], took


def _pooled(worth: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Cells as blocks whose guesses are worth less and less, and how many cells each has.

    A cell that was seldom seen must not hide those behind it.
    """
    blocks: list[tuple[float, float, int]] = []
    for of, count in zip(worth.tolist(), rows.tolist(), strict=True):
        cells = 1
        while blocks and of * blocks[-1][1] >= blocks[-1][0] * count:
            last = blocks.pop()
            of, count, cells = of + last[0], count + last[1], cells + last[2]
        blocks.append((of, count, cells))
    return np.array([of for of, *_ in blocks]), np.array([count for _, count, _ in blocks]), [n for *_, n in blocks]


def _at(seconds: np.ndarray, rows: float) -> float:
    return float(np.interp(rows, np.arange(1, 1 + len(seconds)), seconds))


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
