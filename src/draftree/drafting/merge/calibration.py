"""How often a drafter's draft tokens come true, verified or not, by comparing whole drafts with the text that came.

Merging drafters needs to know what each of them is worth, also of draft tokens that did not get into the joint tree.
Lossless decoding makes the comparison exact: the text does not depend on what was verified. The counts are those of a
`AcceptanceStatistics`, one for all requests and one for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafting.acceptance_statistics import FADING_OWN, AcceptanceStatistics, cells_of
from draftree.drafting.base import ByRequest, RequestState
from draftree.tree import TokenTree, follow

EVERY = 2  # drafts of a request between two that are compared, once much is known: comparing costs as much as drafting
KNOWN = 64  # drafts after which that begins


class _Draft(NamedTuple):
    """A draft whose text is still to come: the position behind its root, its nodes, and its draft tokens' cells."""

    position: int
    tokens: list[int]
    parents: list[int]
    cells: list[int]


class Calibration:
    """Probability that a draft token comes true, given its drafter's own log-probability and its rank."""

    def __init__(self) -> None:
        self._ledger = AcceptanceStatistics()
        self._own: ByRequest[AcceptanceStatistics] = ByRequest()
        self._waiting: ByRequest[deque[_Draft]] = ByRequest()
        self._offered = 0

    def worth(self, trees: TokenTree, requests: Sequence[RequestState]) -> np.ndarray:
        """[B, N], the probability that each node's path is the text; roots and padding get 0."""
        logp = trees.logp.numpy(force=True)
        worth = np.zeros(logp.shape)
        for b, (request, size) in enumerate(zip(requests, trees.sizes, strict=True)):
            if size > 1:
                chances = self._ledger.chances(self._own.get(request.id))
                worth[b, 1:size] = [chances[cell] for cell in cells_of(logp[b, 1:size].tolist())]
        return worth

    def remember(self, requests: Sequence[RequestState], trees: TokenTree) -> None:
        """Keep the drafts until their text has come."""
        self._offered += 1
        if self._offered > KNOWN and self._offered % EVERY:
            return
        logp, parents, tokens = trees.logp.tolist(), trees.parents.tolist(), trees.tokens.tolist()
        for b, (request, size) in enumerate(zip(requests, trees.sizes, strict=True)):
            if size > 1:
                draft = _Draft(len(request.tokens), tokens[b][:size], parents[b][:size], cells_of(logp[b][1:size]))
                self._waiting.setdefault(request.id, deque()).append(draft)

    def compare(self, requests: Sequence[RequestState]) -> None:
        """Learn from drafts whose text has come as far as it agrees with them."""
        for request in requests:
            waiting = self._waiting.get(request.id)
            while waiting:
                right, ended = _right(waiting[0], request.tokens)
                if not ended:
                    break
                self._learn(request, waiting.popleft(), right)

    def forget(self, request: RequestState) -> None:
        """The request is over: what is right to the end of its text is learned from as far as that went."""
        for draft in self._waiting.pop(request.id, ()):
            if len(request.tokens) > draft.position:
                self._learn(request, draft, _right(draft, request.tokens)[0])
        self._own.pop(request.id, None)

    def _learn(self, request: RequestState, draft: _Draft, right: list[int]) -> None:
        own = self._own.setdefault(request.id, AcceptanceStatistics(FADING_OWN))
        for ledger in (self._ledger, own):
            ledger.add(draft.cells, right)


def _right(draft: _Draft, text: Sequence[int]) -> tuple[list[int], bool]:
    """Draft tokens on the text's path, counted from 0, and whether more text can add none."""
    right: list[int] = []
    found = [0]
    for _, found in follow(draft.tokens, draft.parents, text[draft.position :]):
        right += [node - 1 for node in found]
    return right, set(found).isdisjoint(draft.parents)
