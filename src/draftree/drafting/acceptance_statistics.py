"""Acceptance statistics: how often draft tokens are accepted, by rank and log-probability.

A draft token belongs to a cell: its rank among the tree's draft tokens (the first, the next two, the next three, the
rest), and its log-probability in bins. The rank matters as a trie may give one number to a copied branch and to one
that it saw once. Each cell counts verified and accepted draft tokens. A request's own counts are shrunk towards those
of all requests. Counts fade, so that changes of text are followed. Trees have a dozen draft tokens, for which Python
lists are faster than arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

BINS, WIDTH = 16, 0.35  # bins of the log-probability; the last one is open
RANKS = (1, 3, 6)  # ranks, counted from 0, at which the second, third and fourth class begin
CLASSES = len(RANKS) + 1
FADING_ALL, FADING_OWN = 0.998, 0.97  # weight of the past per step
SHRINK = 8.0  # weight of all requests' share in a request's own, in draft tokens
CLAIM = 2.0  # weight of the drafter's own probability in all requests' share, in draft tokens
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

    def __init__(self, fading: float = FADING_ALL) -> None:
        self._growth = 1 / fading
        self._weight = 1.0  # of a draft token of the coming step; it grows instead of fading the counts
        self._verified = [0.0] * (BINS * CLASSES)
        self._accepted = [0.0] * (BINS * CLASSES)

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

    def chances(self, own: AcceptanceStatistics | None = None) -> list[float]:
        """Return the acceptance probability of each cell, for the request with the statistics `own`."""
        claim, scale = CLAIM * self._weight, self._weight
        shares = [
            (accepted + scale * claimed) / (verified + claim)
            for accepted, verified, claimed in zip(self._accepted, self._verified, _CLAIMED, strict=True)
        ]
        if own is None:
            return shares
        shrink = SHRINK * own._weight
        return [
            (accepted + shrink * share) / (verified + shrink)
            for accepted, verified, share in zip(own._accepted, own._verified, shares, strict=True)
        ]
