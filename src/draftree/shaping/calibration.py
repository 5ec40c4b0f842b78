"""How often a drafter's guesses come true, by the probability that the drafter gave them.

Guesses are binned by path probability, and a bin's worth is the share of its guesses that the text then confirmed.
Trees whose best guess is good, middling or poor are told apart: an unlikely guess beside a good one comes true more
often than the same number in a tree that knows nothing.
What is compared is the whole drafted tree with the text that came, as soon as enough of it is there, and not only
the nodes that were verified: those are chosen by this very estimate, so an estimate that is too low would never be
corrected. Lossless decoding makes it exact: the text does not depend on what was verified. Every step's tree counts,
for steps gather where text is hard, and samples by the token would look at the easy parts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.drafting.base import Context
from draftree.tree import TokenTree

BINS = 24
PER_FACTOR = 4  # bins to a factor of e; the last one holds all that is below
KIND_LEAST = (-0.5, -1.2)  # log-probability of the best guess above which a tree is good, or middling
KINDS = len(KIND_LEAST) + 1
FORGET = 0.99  # weight of the past at each tree that adds to a bin
PRIOR = 10.0  # how many trees the drafter's own probability counts for
RECENT = 0.95  # weight of the past in judging the last few trees of a request
DOUBT = 6.0  # right guesses by which a request's own record counts as much as that of all
MOST = 4.0  # how much more often than all its guesses may be held to come true: a text that is copied goes far
SUREST = 0.999  # no guess counts as surer
POOL_EVERY = 16  # trees between two readings of the rates, which cost more than a tree
KNOWN, LEARN_EVERY = 64, 3  # trees after which only each third is learned from: it costs as much as drafting


@dataclass(slots=True)
class _Drafted:
    """A tree whose text is still to come: the position behind its root, and its nodes in flat arrays."""

    position: int
    tokens: np.ndarray
    parents: np.ndarray
    logp: np.ndarray


class Calibration:
    """Probability that a guess is walked, given what the drafter thought of it."""

    def __init__(self) -> None:
        centre = np.exp(-(np.arange(BINS) + 0.5) / PER_FACTOR)
        self._right = np.tile(PRIOR * centre, (KINDS, 1))
        self._seen = np.full((KINDS, BINS), PRIOR)
        self._rates: np.ndarray | None = None
        self._learned = self._offered = 0
        # Right guesses among the last few trees, as the rates say and in fact: of each request, and of all.
        self._records: dict[int, tuple[float, float]] = {}
        self._record = (0.0, 0.0)
        self._drafted: defaultdict[int, deque[_Drafted]] = defaultdict(deque)

    @property
    def rates(self) -> np.ndarray:
        """[KINDS, BINS], share of right guesses, never rising from bin to bin: trees are cut in the drafter's order."""
        if self._rates is None:
            self._rates = np.stack([_falling(*kind) for kind in zip(self._right, self._seen, strict=True)])
        return self._rates

    @property
    def waiting(self) -> bool:
        """Whether any tree's text is still to come."""
        return bool(self._drafted)

    def trust(self, request: Context) -> float:
        """What the rates are to be multiplied with for this request: texts differ, and they may change at any time.

        The rates remember hundreds of trees of all texts; a text that goes its own way must not wait that long. A new
        one is taken for what the others were like of late.
        """
        hoped, came = self._record
        usual = min((came + DOUBT) / (hoped + DOUBT), MOST)
        hoped, came = self._records.get(request.id, (0.0, 0.0))
        return min((came + usual * DOUBT) / (hoped + DOUBT), MOST)

    def worth(self, trees: TokenTree, requests: Sequence[Context] | None = None) -> np.ndarray:
        """[B, N], probability that each node is walked; roots and padding get 0.

        Args:
            trees: B trees.
            requests: theirs; None for requests that nothing is known of.
        """
        logp = trees.logp.numpy(force=True)
        bins = _bins(logp)
        worth = np.zeros(logp.shape)
        for b, size in enumerate(trees.sizes):
            if size > 1:
                worth[b, 1:size] = self.rates[_kind(logp[b, 1:size]), bins[b, 1:size]]
                if requests is not None:
                    worth[b] *= self.trust(requests[b])
        return worth if requests is None else np.minimum(worth, SUREST)

    def remember(self, requests: Sequence[Context], trees: TokenTree, *, always: bool = True) -> None:
        """Keep each request's tree until its text has come; once much is known, not every step's unless `always`."""
        self._offered += 1
        if not always and self._learned > KNOWN and self._offered % LEARN_EVERY:
            return
        for b, request in enumerate(requests):
            size = trees.sizes[b]
            if size > 1:
                arrays = (t[b, :size].numpy(force=True) for t in (trees.tokens, trees.parents, trees.logp))
                self._drafted[request.id].append(_Drafted(len(request.tokens), *arrays))

    def compare(self, requests: Sequence[Context]) -> set[int]:
        """Learn from trees whose text has come as far as it agrees; the ids of requests that had a right guess."""
        with_right: set[int] = set()
        if not self._drafted:
            return with_right
        for request in requests:
            waiting = self._drafted.get(request.id)
            while waiting:
                right = _right(waiting[0], request.tokens)
                if right is None:
                    break
                if self._learn(request.id, waiting.popleft(), right):
                    with_right.add(request.id)
                if not waiting:
                    del self._drafted[request.id]
        return with_right

    def forget(self, request: Context) -> None:
        """The request is over; the rest of its text will not come.

        Trees that were right to its end are learned from as far as it went. Were they left out, what is right for long
        would look rarer than it is.
        """
        for drafted in self._drafted.pop(request.id, ()):
            came = len(request.tokens) - drafted.position
            if came > 0:
                rest = _up_to(drafted, came)
                right = _right(rest, request.tokens, ended=True)
                assert right is not None
                self._learn(request.id, rest, right)
        self._records.pop(request.id, None)

    def _learn(self, request: int, drafted: _Drafted, right: np.ndarray) -> bool:
        guesses = drafted.logp[1:]
        kind, bins = _kind(guesses), _bins(guesses)
        expected, found = float(self.rates[kind, bins].sum()), int(right[1:].sum())
        hoped, came = self._records.get(request, (0.0, 0.0))
        self._records[request] = (RECENT * hoped + expected, RECENT * came + found)
        hoped, came = self._record
        self._record = (RECENT * hoped + expected, RECENT * came + found)
        seen = np.bincount(bins, minlength=BINS)
        keep = np.where(seen > 0, FORGET, 1.0)
        self._seen[kind] = keep * self._seen[kind] + seen
        self._right[kind] = keep * self._right[kind] + np.bincount(bins[right[1:]], minlength=BINS)
        self._learned += 1
        if self._learned % POOL_EVERY == 0:
            self._rates = None
        return bool(right[1:].any())


def _up_to(drafted: _Drafted, depth: int) -> _Drafted:
    """The tree's nodes as far as `depth` steps below the root."""
    depths = [0]
    for parent in drafted.parents[1:].tolist():
        depths.append(depths[parent] + 1)
    kept = np.array(depths) <= depth
    place = kept.cumsum() - 1
    parents = np.concatenate([drafted.parents[:1], place[drafted.parents[kept][1:]]])
    return _Drafted(drafted.position, drafted.tokens[kept], parents, drafted.logp[kept])


def _right(drafted: _Drafted, text: list[int], *, ended: bool = False) -> np.ndarray | None:
    """[N] of bool, nodes that the text confirms (the root among them); None where more text may confirm more.

    Not so where it has `ended`; then the nodes must not reach beyond it.
    """
    right = np.zeros(len(drafted.tokens), bool)
    right[0] = True
    below = drafted.parents == 0
    for token in text[drafted.position :]:
        reached = below & (drafted.tokens == token)
        if not reached.any():
            return right
        right |= reached
        below = reached[drafted.parents]
        below[0] = False  # the root's parent, -1, reads the last node
    return right if ended or not below.any() else None


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
    return np.minimum(-PER_FACTOR * logp, BINS - 1).astype(np.int64)  # padding (-inf) goes to the last bin
