"""Which guesses to have, by their place in the tree and the drafter's own log-probability of them.

A tree's guesses, the likeliest first, are in parts (`LEAST_ENDS`), and each part's in bins of log-probability. What
guesses of such a cell bring a step, and how many there are, is known of each request (`Average`); a step that nobody
plans has all guesses of the cells that pay. So trees are large where the drafter is sure, and there are none where it
is not, without a look at any single tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import byref, c_double, c_int64, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from draftree.drafting.base import LEAST_ENDS, wanted
from draftree.shaping.compiled import AHEAD, BINS, LEVELS, PARTS, address_of, library
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.shaping.average import Average

PER_FACTOR = 4  # bins to a factor of e
RARE = 1e-3  # guesses a step: cells with fewer cost nothing
FAR = 12  # guesses of a tree that has such of the last part
SUREST = 0.999  # no guess counts as surer


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


def bins_of(logp: np.ndarray) -> np.ndarray:
    """[n], the bin of each log-probability."""
    return np.minimum(-PER_FACTOR * logp, BINS - 1).astype(np.intp)


def cells_of(logp: np.ndarray) -> np.ndarray:
    """[n], the cells of a tree's guesses of log-probabilities [n], in their order."""
    parts = np.searchsorted(LEAST_ENDS, np.arange(len(logp)), side="right")
    return parts * LEVELS + np.minimum(bins_of(logp), LEVELS - 1)


def least_of(levels: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities that guesses of so many bins are above, for each part of a tree."""
    return tuple([-level / PER_FACTOR if level < LEVELS else -math.inf for level in levels])


def above(trees: TokenTree, least: Sequence[Sequence[float] | None]) -> TokenTree:
    """The trees with the guesses that are wanted (`Context.least`)."""
    logp, falling, sizes = trees.logp.numpy(force=True), True, []
    for of, size, floors in zip(logp, trees.sizes, least, strict=True):
        sizes.append(size - 1 if floors is None else wanted(of[1:size], floors))
        falling = falling and bool((of[1:size] <= of[: size - 1]).all())
    if all(n == size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
        return trees
    return trees.first(sizes) if falling else trees.best(sizes)


def reach(averages: Sequence[Average | None], seconds: np.ndarray, aside: float, *, packed: bool) -> Reach:
    """Which guesses to have in steps that no plan goes before, whose trees are taken for average ones.

    Args:
        averages: of each request; None where one takes no part.
        seconds: of steps with one row, two, and so on to AHEAD guesses of each request.
        aside: seconds that each of them takes beside its rows.
        packed: whether only real rows cost, and not the padding of smaller trees.
    """
    compiled, batch = library(), len(averages)
    if compiled is None:
        return plain_reach(averages, seconds, aside, packed=packed)
    real = c_double * batch
    levels, gains, guesses, took = (c_int64 * (batch * PARTS))(), real(), real(), c_double()
    at = (c_void_p * batch)(*[None if average is None else average.at for average in averages])
    if compiled.counts_ahead(at, batch, address_of(seconds), aside, packed, levels, gains, guesses, byref(took)):
        return plain_reach(averages, seconds, aside, packed=packed)
    flat = levels[:]
    own = [tuple(flat[b : b + PARTS]) for b in range(0, len(flat), PARTS)]
    return Reach(own, gains[:], guesses[:], took.value)


def plain_reach(averages: Sequence[Average | None], seconds: np.ndarray, aside: float, *, packed: bool) -> Reach:
    """The same in numpy."""
    none = np.zeros((2, PARTS, LEVELS))
    values = [none if of is None else of.values[:2].reshape(2, PARTS, LEVELS) for of in averages]
    levels, took = (_reached if packed else _padded)(values, seconds + aside)
    own = [tuple(np.minimum.accumulate(levels[b : b + PARTS]).tolist()) for b in range(0, len(levels), PARTS)]
    gains, guesses = [1.0] * len(own), [0.0] * len(own)
    for b, (of, ends) in enumerate(zip(values, own, strict=True)):
        for part, level in enumerate(ends):
            gains[b] += float(of[0, part, :level].sum())
            guesses[b] += float(of[1, part, :level].sum())
    return Reach(own, gains, guesses, took)


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
            while heads[q] < len(worth) and rows[heads[q]] <= RARE:
                heads[q] += 1
            if heads[q] < len(worth):
                dear = prices[q % PARTS] if prices[q % PARTS] > 0 else 1e-12
                found[q] = worth[heads[q]] / (rows[heads[q]] * dear)
        q = int(np.argmax(found))
        if found[q] <= 0:
            break
        worth, rows, _ = blocks[q]
        gain, taken = gain + worth[heads[q]], taken + rows[heads[q]]
        cost += rows[heads[q]] * prices[q % PARTS]
        heads[q] += 1
        if taken > batch * (AHEAD + 1):
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
    if not rows.any():
        return worth[:0], rows[:0], []
    for of, count in zip(worth.tolist(), rows.tolist(), strict=True):
        cells = 1
        while blocks and of * blocks[-1][1] >= blocks[-1][0] * count:
            last = blocks.pop()
            of, count, cells = of + last[0], count + last[1], cells + last[2]
        blocks.append((of, count, cells))
    return np.array([of for of, *_ in blocks]), np.array([count for _, count, _ in blocks]), [n for *_, n in blocks]


def _at(seconds: np.ndarray, rows: float) -> float:
    return float(np.interp(rows, np.arange(1, 1 + len(seconds)), seconds))
