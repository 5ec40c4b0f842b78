"""How often draft tokens are accepted, by their place in the tree and by what their drafter thought of them.

A draft token belongs to a cell: its rank among the tree's draft tokens by the drafter's log-probability (the first, the
next two, the next three, the rest), and that log-probability itself, in bins. Of each cell is counted how many draft
tokens were verified and how many of them were accepted. The rank matters as well, because a drafter
such as a trie gives the same number to a branch that is copied and to one that was seen once.

There is one ledger for all requests and one for each; a request's own counts are shrunk towards those of all. Counts
fade, so that a text or a drafter that changes is followed, and a cell that was given up is tried again.

Trees that are worth verifying have a dozen draft tokens, for which plain numbers are quicker than arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

BINS, WIDTH = 16, 0.35  # of the log-probability; the last bin holds all below
RANKS = (1, 3, 6)  # ranks, counted from 0, at which the second, third and fourth class begin
CLASSES = len(RANKS) + 1
FADING_ALL, FADING_OWN = 0.998, 0.97  # weight of the past, by step
SHRINK = 8.0  # draft tokens that the share of all counts for in a request's own
CLAIM = 2.0  # draft tokens that the drafter's own probability counts for in the share of all
HEAVY = 1e100  # weight of a step at which all counts are scaled down

_CLAIMED = [CLAIM * math.exp(-WIDTH * (cell // CLASSES + 0.5)) for cell in range(BINS * CLASSES)]
_CLASS_OF = [sum(rank >= first for first in RANKS) for rank in range(RANKS[-1] + 1)]


def cells_of(logp: Sequence[float]) -> list[int]:
    """The cells of a tree's draft tokens of these log-probabilities, in their order."""
    last, most = RANKS[-1], BINS - 1
    ranks: Iterable[int] = range(len(logp))
    if any(a < b for a, b in pairwise(logp)):
        ranks = [0] * len(logp)
        for rank, node in enumerate(sorted(range(len(logp)), key=logp.__getitem__, reverse=True)):
            ranks[node] = rank
    # The log-probability of a token that cannot be is -inf, and drafters may give what is none.
    return [
        CLASSES * (int(min(p, 0.0) / -WIDTH) if p > -WIDTH * BINS else most) + _CLASS_OF[rank if rank < last else last]
        for p, rank in zip(logp, ranks, strict=True)
    ]


class AcceptanceStatistics:
    """Counts of draft tokens by cell, in which the past weighs `fading` less with each step."""

    def __init__(self, fading: float = FADING_ALL) -> None:
        self._growth = 1 / fading
        self._weight = 1.0  # of a draft token of the coming step: it grows, where the counts would fade
        self._verified = [0.0] * (BINS * CLASSES)
        self._accepted = [0.0] * (BINS * CLASSES)

    def add(self, cells: Sequence[int], accepted: Iterable[int]) -> None:
        """A step verified draft tokens of these `cells`; `accepted` are the places among them of those that were."""
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
        """By cell, the probability that its draft tokens are accepted, for the request that `own` is the ledger of."""
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
