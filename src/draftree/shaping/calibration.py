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
from typing import NamedTuple

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
POOL_EVERY = 16  # most trees between two readings of the rates, which cost more than a tree; fewer at first
KNOWN, LEARN_EVERY = 64, 3  # trees after which only each third is learned from: it costs as much as drafting


@dataclass(slots=True)
class _Drafted:
    """A tree whose text is still to come.

    Attributes:
        position: of the text, behind the root.
        tokens, parents: of its nodes, root first.
        kind, bins: where its guesses are counted; bins of the root left out.
    """

    position: int
    tokens: list[int]
    parents: list[int]
    kind: int
    bins: np.ndarray


class _Lesson(NamedTuple):
    """A tree whose text has come: where its guesses are counted, and the bins of those that were right."""

    kind: int
    bins: np.ndarray
    right: list[int]


class Calibration:
    """Probability that a guess is walked, given what the drafter thought of it."""

    def __init__(self) -> None:
        centre = np.exp(-(np.arange(BINS) + 0.5) / PER_FACTOR)
        self._right = np.tile(PRIOR * centre, (KINDS, 1))
        self._seen = np.full((KINDS, BINS), PRIOR)
        self._rates: list[np.ndarray] = []
        self._lessons: list[_Lesson] = []  # not in the rates yet
        self._learned = self._offered = 0
        # Right guesses among the last few trees, as the rates say and in fact: of each request, and of all.
        self._records: dict[int, tuple[float, float]] = {}
        self._record = (0.0, 0.0)
        self._drafted: defaultdict[int, deque[_Drafted]] = defaultdict(deque)
        self._last: tuple[TokenTree, list[tuple[int, np.ndarray]]] | None = None
        self._read_rates()

    @property
    def rates(self) -> np.ndarray:
        """[KINDS, BINS], share of right guesses, never rising from bin to bin: trees are cut in the drafter's order."""
        return np.stack(self._rates)

    def _read_rates(self) -> None:
        """Let the rates know of the lessons."""
        for kind in range(KINDS):
            seen = [np.bincount(bins, minlength=BINS) for of, bins, _ in self._lessons if of == kind]
            if seen:
                right = [np.bincount(right, minlength=BINS) for of, _, right in self._lessons if of == kind]
                counts = np.array(seen)
                touched = (counts > 0)[::-1].cumsum(0)[::-1]  # lessons from here on that add to a bin
                later = FORGET ** (touched - (counts > 0))
                whole = FORGET ** touched[0]
                self._seen[kind] = whole * self._seen[kind] + (later * counts).sum(0)
                self._right[kind] = whole * self._right[kind] + (later * np.array(right)).sum(0)
        self._lessons.clear()
        self._rates = [_falling(*kind) for kind in zip(self._right, self._seen, strict=True)]

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

    def _of(self, trees: TokenTree) -> list[tuple[int, np.ndarray]]:
        """Kind and bins of each tree's guesses; remembering and weighing ask for the same trees one after the other."""
        last = self._last  # read once: another thread may put its own
        if last is None or last[0] is not trees:
            logp = trees.logp.numpy(force=True)
            guesses = [row[1:size] for row, size in zip(logp, trees.sizes, strict=True)]
            last = self._last = (trees, [(_kind(of), _bins(of)) if len(of) else (0, NO_BINS) for of in guesses])
        return last[1]

    def worth(self, trees: TokenTree, requests: Sequence[Context] | None = None) -> np.ndarray:
        """[B, N], probability that each node is walked; roots and padding get 0.

        Args:
            trees: B trees.
            requests: theirs; None for requests that nothing is known of.
        """
        worth = np.zeros((trees.batch, trees.width))
        for b, (kind, bins) in enumerate(self._of(trees)):
            if len(bins):
                own = self._rates[kind].take(bins)
                if requests is not None:
                    own *= self.trust(requests[b])
                    np.minimum(own, SUREST, out=own)
                worth[b, 1 : 1 + len(bins)] = own
        return worth

    def remember(self, requests: Sequence[Context], trees: TokenTree, *, always: bool = True) -> None:
        """Keep each request's tree until its text has come; once much is known, not every step's unless `always`."""
        self._offered += 1
        if not always and self._learned > KNOWN and self._offered % LEARN_EVERY:
            return
        tokens, parents = trees.tokens.numpy(force=True), trees.parents.numpy(force=True)
        for b, (request, (kind, bins)) in enumerate(zip(requests, self._of(trees), strict=True)):
            if size := len(bins):
                nodes = tokens[b, : size + 1].tolist(), parents[b, : size + 1].tolist()
                self._drafted[request.id].append(_Drafted(len(request.tokens), *nodes, kind, bins))

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
                drafted = waiting.popleft()
                self._learn(request.id, drafted.kind, drafted.bins, right)
                if right:
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
                right = _right(drafted, request.tokens, ended=True)
                assert right is not None
                self._learn(request.id, drafted.kind, drafted.bins[_within(drafted, came)], right)
        self._records.pop(request.id, None)

    def _learn(self, request: int, kind: int, bins: np.ndarray, right: list[int]) -> None:
        """The tree's guesses in `bins` are known to be right or wrong; `right` has the bins of those that are."""
        expected, found = float(self._rates[kind].take(bins).sum()), len(right)
        hoped, came = self._records.get(request, (0.0, 0.0))
        self._records[request] = (RECENT * hoped + expected, RECENT * came + found)
        hoped, came = self._record
        self._record = (RECENT * hoped + expected, RECENT * came + found)
        self._lessons.append(_Lesson(kind, bins, right))
        self._learned += 1
        if len(self._lessons) >= min(POOL_EVERY, 1 + self._learned // POOL_EVERY):
            self._read_rates()


def _within(drafted: _Drafted, depth: int) -> np.ndarray:
    """[N - 1] of bool: guesses up to `depth` steps below the root."""
    depths = [0]
    for parent in drafted.parents[1:]:
        depths.append(depths[parent] + 1)
    return np.array(depths[1:]) <= depth


def _right(drafted: _Drafted, text: list[int], *, ended: bool = False) -> list[int] | None:
    """Bins of the nodes that the text confirms; None where more text may confirm more, and it has not `ended`."""
    parents, tokens = drafted.parents, drafted.tokens
    right: list[int] = []
    reached = {0}
    for at in range(drafted.position, len(text)):
        token = text[at]
        reached = {node for node, own in enumerate(tokens) if own == token and parents[node] in reached}
        if not reached:
            break
        right += reached
    if not ended and not reached.isdisjoint(parents):
        return None
    return [int(drafted.bins[node - 1]) for node in right]


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


NO_BINS = np.empty(0, np.intp)
