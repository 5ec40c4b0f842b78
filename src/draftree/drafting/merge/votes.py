"""Join the trees of several drafters: calibrate their probabilities, then combine those of one token.

- A trie's hit counts and a head's softmax are not comparable. So a drafter's path probabilities are replaced by the
  share of its draft tokens that came true (`Calibration`), and read as probabilities of a token after its parent.
- Lossless decoding makes that share exact also for draft tokens that were not verified: no text depends on them.
- Where two drafters draft the same token, the chance that both are wrong is the product of theirs, as if they were
  independent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafting.acceptance_statistics import FADING_OWN, AcceptanceStatistics, cells_of
from draftree.drafting.base import ByRequest, RequestState
from draftree.tree import Draft, TokenTree, follow
from draftree.tree.structure import check_parents

TIE = 0.02  # weight of a drafter's own log-probability, which orders draft tokens of one cell
LEAST, CERTAIN = 1e-6, 0.999  # probabilities of a token after its parent
EVERY, KNOWN = 2, 64  # after 64 drafts every second one is compared: comparing costs as much as drafting


class _Draft(NamedTuple):
    """A draft to be compared with the text: the position behind its root, its nodes, and its draft tokens' cells."""

    position: int
    tokens: list[int]
    parents: list[int]
    cells: list[int]


class Calibration:
    """Learns how often one drafter's draft tokens come true, by their log-probability and rank."""

    def __init__(self) -> None:
        self._all = AcceptanceStatistics()
        self._own: ByRequest[AcceptanceStatistics] = ByRequest()
        self._waiting: ByRequest[deque[_Draft]] = ByRequest()
        self._offered = 0

    def worth(self, trees: TokenTree, requests: Sequence[RequestState]) -> np.ndarray:
        """Return the probability that each node's path is the text, float64 [B, N]; 0 for roots and padding."""
        logp = trees.logp.numpy(force=True)
        worth = np.zeros(logp.shape)
        for b, (request, size) in enumerate(zip(requests, trees.sizes, strict=True)):
            if size > 1:
                chances = self._all.chances(self._own.get(request.id))
                worth[b, 1:size] = [chances[cell] for cell in cells_of(logp[b, 1:size].tolist())]
        return worth

    def remember(self, requests: Sequence[RequestState], trees: TokenTree) -> None:
        """Store drafts, to be compared with the text later."""
        self._offered += 1
        if self._offered > KNOWN and self._offered % EVERY:
            return
        logp, parents, tokens = trees.logp.tolist(), trees.parents.tolist(), trees.tokens.tolist()
        for b, (request, size) in enumerate(zip(requests, trees.sizes, strict=True)):
            if size > 1:
                draft = _Draft(len(request.tokens), tokens[b][:size], parents[b][:size], cells_of(logp[b][1:size]))
                self._waiting.setdefault(request.id, deque()).append(draft)

    def compare(self, requests: Sequence[RequestState]) -> None:
        """Learn from drafts that more text cannot change."""
        for request in requests:
            waiting = self._waiting.get(request.id)
            while waiting:
                right, ended = _right(waiting[0], request.tokens)
                if not ended:
                    break
                self._learn(request, waiting.popleft(), right)

    def forget(self, request: RequestState) -> None:
        """Learn from the remaining drafts of a request that ends, and drop its state."""
        for draft in self._waiting.pop(request.id, ()):
            if len(request.tokens) > draft.position:
                self._learn(request, draft, _right(draft, request.tokens)[0])
        self._own.pop(request.id, None)

    def _learn(self, request: RequestState, draft: _Draft, right: list[int]) -> None:
        own = self._own.setdefault(request.id, AcceptanceStatistics(FADING_OWN))
        for statistics in (self._all, own):
            statistics.add(draft.cells, right)


def _right(draft: _Draft, text: Sequence[int]) -> tuple[list[int], bool]:
    """Return the draft tokens on the text's path, counted from 0, and whether more text can add none."""
    right: list[int] = []
    found = [0]
    for _, found in follow(draft.tokens, draft.parents, text[draft.position :]):
        right += [node - 1 for node in found]
    return right, set(found).isdisjoint(draft.parents)


Vote = tuple[float, int]  # probability of a token after its parent, and the number of the drafter that claims it


class _Proposed(NamedTuple):
    """One drafter's trees: its nodes' tokens, parents, and probabilities after their parents, each [B][N]."""

    sizes: tuple[int, ...]
    tokens: list[list[int]]
    parents: list[list[int]]
    steps: list[list[float]]


class Votes:
    """Joins the trees of some drafters, and learns how often each is right.

    Attributes:
        calibrations: one for each drafter.
    """

    def __init__(self, drafters: int) -> None:
        self.calibrations = [Calibration() for _ in range(drafters)]

    def join(self, requests: Sequence[RequestState], trees: Sequence[TokenTree], budgets: Sequence[int]) -> TokenTree:
        """Return the best `budgets[b]` draft tokens of all drafters for each request, best first.

        `trees` has one entry for each drafter. Bit i of a node's source stands for drafter i; its log-probability is
        that of the joined path.
        """
        drafted: list[_Proposed | None] = []
        for calibration, tree in zip(self.calibrations, trees, strict=True):
            if tree.width > 1:
                calibration.remember(requests, tree)
            drafted.append(_read(calibration, tree, requests) if tree.width > 1 else None)
        joined = [_union(b, drafted) for b in range(len(requests))]
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], joined, budgets)

    def compare(self, requests: Sequence[RequestState]) -> None:
        """Learn from emitted text."""
        for calibration in self.calibrations:
            calibration.compare(requests)

    def forget(self, request: RequestState) -> None:
        """Drop the state of a request that ends."""
        for calibration in self.calibrations:
            calibration.forget(request)


def _read(calibration: Calibration, tree: TokenTree, requests: Sequence[RequestState]) -> _Proposed:
    parents = tree.parents.numpy(force=True)
    check_parents(parents)
    paths = calibration.worth(tree, requests) * np.exp(TIE * tree.logp.numpy(force=True))
    paths[:, 0] = 1.0
    above = np.take_along_axis(paths, parents.clip(min=0), 1)
    steps = (paths / above.clip(min=LEAST)).clip(LEAST, CERTAIN)
    return _Proposed(tree.sizes, tree.tokens.tolist(), parents.tolist(), steps.tolist())


def _union(b: int, drafted: Sequence[_Proposed | None]) -> Draft:
    """Return all draft tokens for request b, each path once, with their joint probabilities."""
    tokens, parents = [-1], [-1]
    votes: list[list[Vote]] = [[]]
    place: dict[tuple[int, int], int] = {}
    for drafter, own in enumerate(drafted):
        if own is None:
            continue
        local = [0]
        own_tokens, own_parents, steps = own.tokens[b], own.parents[b], own.steps[b]
        for i in range(1, own.sizes[b]):
            token, above, vote = own_tokens[i], local[own_parents[i]], (steps[i], drafter)
            node = place.get((above, token))
            if node is None:
                node = place[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
                votes.append([vote])
            elif votes[node][-1][1] != drafter:
                votes[node].append(vote)
            else:  # branches that a trie keeps apart
                votes[node][-1] = max(votes[node][-1], vote)
            local.append(node)
    logp = [0.0]  # a chain's probability may be too small for a float
    for node in range(1, len(tokens)):
        wrong = math.prod(1 - step for step, _ in votes[node])
        logp.append(logp[parents[node]] + math.log(1 - wrong))
    return (
        tokens[1:],
        [parent - 1 for parent in parents[1:]],
        logp[1:],
        [sum(1 << drafter for _, drafter in own_votes) for own_votes in votes[1:]],
    )
