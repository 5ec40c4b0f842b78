"""How often draft tokens are accepted, by their place in the tree and by what their drafter thought of them.

A draft token belongs to a cell: its rank among the tree's draft tokens by the drafter's log-probability (the first, the
next two, the next three, the rest), and that log-probability itself, in bins. Of each cell is counted how many draft
tokens were verified and how many of them were accepted. The rank matters beside the log-probability because a drafter
such as a trie gives the same number to a branch that is copied and to one that was seen once.

There is one ledger for all requests and one for each; a request's own counts are shrunk towards those of all. Counts
fade, so that a text or a drafter that changes is followed, and a cell that was given up is tried again.
"""

from __future__ import annotations

import numpy as np

BINS, WIDTH = 16, 0.35  # of the log-probability; the last bin holds all below
RANKS = np.array([1, 3, 6])  # ranks, counted from 0, at which the second, third and fourth class begin
CELLS = BINS * (len(RANKS) + 1)
FADING_ALL, FADING_OWN = 0.998, 0.97  # weight of the past, by step
SHRINK = 8.0  # draft tokens that the share of all counts for in a request's own
CLAIM = 3.0  # draft tokens that the drafter's own probability counts for in the share of all
CLAIMED = np.repeat(np.exp(-WIDTH * (np.arange(BINS) + 0.5)), len(RANKS) + 1)


def cells_of(logp: np.ndarray) -> np.ndarray:
    """The cells [n] of a tree's draft tokens, whose log-probabilities [n] fall."""
    bins = np.minimum((logp / -WIDTH).astype(np.int64), BINS - 1)
    return bins * (len(RANKS) + 1) + _classes(len(logp))


_CLASSES = np.searchsorted(RANKS, np.arange(1024), side="right")


def _classes(count: int) -> np.ndarray:
    return _CLASSES[:count] if count <= len(_CLASSES) else np.searchsorted(RANKS, np.arange(count), side="right")


class Ledger:
    """Counts of draft tokens by cell.

    Args:
        fading: weight of the past, by step.
    """

    def __init__(self, fading: float = FADING_ALL) -> None:
        self._fading = fading
        self._verified = np.zeros(CELLS)
        self._accepted = np.zeros(CELLS)

    def add(self, cells: np.ndarray, accepted: np.ndarray) -> None:
        """A step verified draft tokens of these `cells` [n]; `accepted` [m] are the cells of those on the path."""
        self._verified *= self._fading
        self._accepted *= self._fading
        # A cell may be there more than once.
        self._verified += np.bincount(cells, minlength=CELLS)
        self._accepted += np.bincount(accepted, minlength=CELLS)

    def shares(self) -> np.ndarray:
        """[CELLS], the probability that a draft token of each cell is accepted, over all requests."""
        return (self._accepted + CLAIM * CLAIMED) / (self._verified + CLAIM)

    def own_shares(self, shares: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """The same for this ledger's request, at `cells` [n], given the `shares` of all."""
        return (self._accepted[cells] + SHRINK * shares[cells]) / (self._verified[cells] + SHRINK)
