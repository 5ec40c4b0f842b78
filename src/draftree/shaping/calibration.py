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

import numpy as np

from draftree.drafting.base import Context
from draftree.shaping.average import Average
from draftree.shaping.counts import Drafted, Sizes, new_counts
from draftree.tree import TokenTree

RECENT = 0.9  # weight of the past in judging the last few trees of a request
DOUBT = 6.0  # right guesses by which a request's own record counts as much as that of all
MOST = 4.0  # how much more often than all its guesses may be held to come true: a text that is copied goes far
POOL_EVERY = 16  # most trees between two readings of the rates, which cost more than a tree; fewer at first
KNOWN, LEARN_EVERY = 64, 3  # trees after which only each third is learned from: it costs as much as drafting


class Calibration:
    """Probability that a guess is walked, given what the drafter thought of it."""

    def __init__(self) -> None:
        self._counts = new_counts()
        self._learned = self._offered = self._unread = 0
        # Right guesses among the last few trees, as the rates say and in fact: of each request, and of all.
        self._records: dict[int, tuple[float, float]] = {}
        self._record = (0.0, 0.0)
        self._drafted: defaultdict[int, deque[Drafted]] = defaultdict(deque)

    @property
    def rates(self) -> np.ndarray:
        """[KINDS, BINS], share of right guesses, never rising from bin to bin: trees are cut in the drafter's order."""
        return self._counts.rates

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
        worth = np.zeros(logp.shape)
        for b, size in enumerate(trees.sizes):
            if size > 1:
                trust = 1.0 if requests is None else self.trust(requests[b])
                worth[b, 1:size] = self._counts.worth(logp[b, 1:size], trust)
        return worth

    def plan(
        self,
        requests: Sequence[Context],
        trees: TokenTree,
        averages: Sequence[Average | None],
        seconds: np.ndarray,
        *,
        packed: bool,
    ) -> Sizes | None:
        """Sizes for this step; see `Counts.plan`."""
        trust = [self.trust(request) for request in requests]
        return self._counts.plan(trees, trust, averages, seconds, packed=packed)

    def remember(self, requests: Sequence[Context], trees: TokenTree, *, always: bool = True) -> None:
        """Keep each request's tree until its text has come; once much is known, not every step's unless `always`."""
        self._offered += 1
        if not always and self._learned > KNOWN and self._offered % LEARN_EVERY:
            return
        if not trees.tokens.is_cpu:
            trees = trees.to("cpu")
        for b, (request, size) in enumerate(zip(requests, trees.sizes, strict=True)):
            if size > 1:
                self._drafted[request.id].append(Drafted(len(request.tokens), trees, b))

    def compare(self, requests: Sequence[Context]) -> set[int]:
        """Learn from trees whose text has come as far as it agrees; the ids of requests that had a right guess."""
        with_right: set[int] = set()
        if not self._drafted:
            return with_right
        for request in requests:
            waiting = self._drafted.get(request.id)
            while waiting:
                right = self._learn(request, waiting[0])
                if right is None:
                    break
                waiting.popleft()
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
            if len(request.tokens) > drafted.position:
                self._learn(request, drafted, ended=True)
        self._records.pop(request.id, None)

    def _learn(self, request: Context, drafted: Drafted, *, ended: bool = False) -> int | None:
        """How many guesses of the tree were right; None where more text may confirm more."""
        lesson = self._counts.learn(drafted, request.tokens, ended=ended)
        if lesson is None:
            return None
        expected, found = lesson
        hoped, came = self._records.get(request.id, (0.0, 0.0))
        self._records[request.id] = (RECENT * hoped + expected, RECENT * came + found)
        hoped, came = self._record
        self._record = (RECENT * hoped + expected, RECENT * came + found)
        self._learned += 1
        self._unread += 1
        if self._unread >= min(POOL_EVERY, 1 + self._learned // POOL_EVERY):
            self._counts.read()
            self._unread = 0
        return found
