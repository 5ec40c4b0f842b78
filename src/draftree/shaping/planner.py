"""Choose the number of draft tokens with most tokens per second (ProPD, section 4.2).

A step over B requests gives B tokens and as many more as draft tokens are accepted; it takes the time of its rows and
of the drafter's work. Draft tokens of all requests compete, the likeliest first, and n of them are taken where

    (B + sum of the n best probabilities) / T(B + n)

is largest. Where trees are padded to the largest of the batch, a row more is a row more for every request.

The probability that a draft token is accepted is learned. The token belongs to a cell: its rank among the tree's draft
tokens (the first, the next two, the next three, the rest), and its log-probability in bins. The rank matters as a trie
may give one number to a copied branch and to one that it saw once. Each cell counts verified and accepted draft tokens
of all requests. Counts fade, so that changes of text are followed. Trees have a dozen draft tokens, for which Python
lists are faster than arrays.

**The pause policy.** A step is plain, or it drafts: unprepared, or from what the pass before has prepared (drafters
inside the model). The advantage of each way is the accepted tokens less the extra time, counted in plain tokens. A way
with an expected loss pauses for eight steps, and twice as long each further time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

BINS, WIDTH = 16, 0.35  # bins of the log-probability; the last one is open
RANKS = (1, 3, 6)  # ranks, counted from 0, at which the second, third and fourth class begin
CLASSES = len(RANKS) + 1
FADING = 0.99  # weight of the past per step
CLAIM = 4.0  # weight of the drafter's own probability, in draft tokens
HEAVY = 1e100  # weight of a step at which all counts are scaled down

_CLAIMED = [CLAIM * math.exp(-WIDTH * (cell // CLASSES + 0.5)) for cell in range(BINS * CLASSES)]
_CLASS_OF = [sum(rank >= first for first in RANKS) for rank in range(RANKS[-1] + 1)]


def cells_of(logp: Sequence[float]) -> list[int]:
    """Return the cells of a tree's draft tokens, given their log-probabilities."""
    last, most = RANKS[-1], BINS - 1
    ranks: Iterable[int] = range(len(logp))
    if any(a < b for a, b in pairwise(logp)):
        ranks = [0] * len(logp)
        for rank, node in enumerate(sorted(range(len(logp)), key=logp.__getitem__, reverse=True)):
            ranks[node] = rank
    # Log-probabilities may be -inf or NaN.
    return [
        CLASSES * (int(min(p, 0.0) / -WIDTH) if p > -WIDTH * BINS else most) + _CLASS_OF[rank if rank < last else last]
        for p, rank in zip(logp, ranks, strict=True)
    ]


class AcceptanceStatistics:
    """Counts of draft tokens by cell, in which the past weighs `fading` less with each step."""

    def __init__(self, fading: float = FADING) -> None:
        self._growth = 1 / fading
        self._weight = 1.0  # of a draft token of the coming step; it grows instead of fading the counts
        self._verified = [0.0] * (BINS * CLASSES)
        self._accepted = [0.0] * (BINS * CLASSES)
        self._chances: list[float] | None = None  # None after learning

    def add(self, cells: Sequence[int], accepted: Iterable[int]) -> None:
        """Count verified draft tokens of these `cells`; `accepted` are indices into `cells`."""
        weight = self._weight = self._growth * self._weight
        for cell in cells:
            self._verified[cell] += weight
        for place in accepted:
            self._accepted[cells[place]] += weight
        if weight > HEAVY:
            self._verified = [count / weight for count in self._verified]
            self._accepted = [count / weight for count in self._accepted]
            self._weight = 1.0
        self._chances = None

    def chances(self) -> list[float]:
        """Return the acceptance probability of each cell."""
        if self._chances is None:
            claim, scale = CLAIM * self._weight, self._weight
            self._chances = [
                (accepted + scale * claimed) / (verified + claim)
                for accepted, verified, claimed in zip(self._accepted, self._verified, _CLAIMED, strict=True)
            ]
        return self._chances


def choose(chances: Sequence[Sequence[float]], seconds: Sequence[float], *, packed: bool) -> list[int]:
    """Return the number of draft tokens of each request with most tokens per second.

    Args:
        chances: for each of B requests, the probabilities that its draft tokens are accepted, in falling order of what
            the drafter's log-probability; a tree is cut in that order.
        seconds: time of steps with B rows, B + 1, and so on; the last one limits the rows.
        packed: whether only real rows cost; otherwise all trees are padded to the largest.
    """
    batch = len(chances)
    # A tree is cut in its drafter's order, so a later draft token counts for no more than an earlier one.
    chances = [list(accumulate(own, min)) for own in chances]
    if batch == 1:
        return [_best(chances[0], seconds, 1)]
    if not packed:
        width = max(map(len, chances))
        together = [sum(own[i] for own in chances if i < len(own)) for i in range(width)]
        best = _best(together, seconds[::batch], batch)
        return [min(best, len(own)) for own in chances]
    offered = [(chance, b) for b, own in enumerate(chances) for chance in own]
    offered.sort(key=lambda each: -each[0])
    sizes = [0] * batch
    for _, b in offered[: _best([chance for chance, _ in offered], seconds, batch)]:
        sizes[b] += 1
    return sizes


def _best(chances: Sequence[float], seconds: Sequence[float], batch: int) -> int:
    """Return how many of the `chances`, from the first, give most tokens per second."""
    best, tokens = 0, float(batch)
    fastest = tokens / seconds[0]
    for count, (chance, time) in enumerate(zip(chances, seconds[1:], strict=False), 1):
        tokens += chance
        if tokens > fastest * time:
            best, fastest = count, tokens / time
    return best


PLAIN, UNPREPARED, PREPARED = 0, 1, 2
ADVANTAGE_FADING = 0.98  # weight of the past per step
HOPE, HOPED = 0.25, 8.0  # prior advantage in tokens, and its weight in steps
TRIAL = 8  # steps of a new way before it is compared with others
ALLOWANCE, RETRIAL = 1.0, 0.4  # tokens that a way may lose before it pauses: first, and after a pause
PAUSE_FIRST, PAUSE_LAST = 8, 64  # steps


class _Way:
    """The advantage of one way of drafting, and its pauses."""

    __slots__ = ("_sum", "_weight", "credit", "left", "length", "steps")

    def __init__(self) -> None:
        self._sum, self._weight = HOPED * HOPE, HOPED  # sum and number of advantages, with fading weights
        self.steps = 0
        self.left = 0  # steps until the pause ends
        self.length = PAUSE_FIRST  # of the next pause
        self.credit = ALLOWANCE  # tokens that it may still lose before it pauses

    @property
    def advantage(self) -> float:
        """Return the expected advantage of a step, in tokens."""
        return self._sum / self._weight

    @property
    def on_trial(self) -> bool:
        """Return whether it must be tried: it is new, or its last pause is over."""
        return self.steps < TRIAL or self.length > PAUSE_FIRST

    def record(self, advantage: float, against: float) -> None:
        """Record the advantage of a step; the best other way is expected to have `against`."""
        self.steps += 1
        self._sum = ADVANTAGE_FADING * self._sum + advantage
        self._weight = ADVANTAGE_FADING * self._weight + 1.0
        if self.advantage >= against:
            self.credit, self.length = ALLOWANCE, PAUSE_FIRST
            return
        self.credit += min(advantage - against, 0.0)
        if self.credit < 0.0:
            self.left, self.credit = self.length, RETRIAL
            self.length = min(2 * self.length, PAUSE_LAST)


class PausePolicy:
    """Decides how steps draft, for all requests of a drafter; `ways` are of UNPREPARED and PREPARED."""

    def __init__(self, ways: Sequence[int]) -> None:
        self._ways = {way: _Way() for way in ways}

    def next(self) -> int:
        """Return the way of the coming step: one on trial, else the best. Count a step of all pauses."""
        free = [(way, own) for way, own in self._ways.items() if not own.left]
        for own in self._ways.values():
            own.left = max(own.left - 1, 0)
        if not free:
            return PLAIN
        return max(free, key=lambda each: (each[1].on_trial, each[1].advantage))[0]

    def resume(self) -> None:
        """End all pauses, for a new request: its text may be of another kind."""
        for own in self._ways.values():
            own.left = 0

    def record(self, way: int, advantage: float) -> None:
        """Record a step that drafted in a way, with its advantage in tokens."""
        own = self._ways[way]
        others = (a for a in self._ways.values() if a is not own and not a.left and not a.on_trial)
        own.record(advantage, max([0.0, *(other.advantage for other in others)]))
