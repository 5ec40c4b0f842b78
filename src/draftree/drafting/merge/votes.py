"""One tree of several drafters' trees: their probabilities are calibrated, then those for one token are combined.

A trie's hit counts and a head's softmax cannot be compared as they are. So each drafter's path probabilities are first
turned into shares of draft tokens that were accepted (`Calibration`), and read as probabilities of a token after its
parent. Where two drafters draft the same token, the chance that both are wrong is the product of theirs if they know
different things, and only the smaller of theirs if they know the same. How near the first a pair of drafters comes is
learned from the text. The larger of the two probabilities would leave that unused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafting.base import ByRequest, Context
from draftree.drafting.merge.calibration import Calibration
from draftree.tree import Draft, TokenTree

TIE = 0.02  # weight of a drafter's own log-probability: keeps its order where calibration sees no difference
LEAST, CERTAIN = 1e-6, 0.999  # probabilities of a token after its parent
WEIGHT_FIRST = 1.0  # weight of a second drafter's vote before it is learned: as if it knew different things
WEIGHT_MOST = 3.0  # more than 1 where two drafters that agree are more often right than both of them claim
LEARNING_RATE = 0.05  # of that weight

Vote = tuple[float, int]  # probability of a token after its parent, and the number of the drafter that claims it


class _Proposed(NamedTuple):
    """One drafter's trees: its nodes' tokens, parents, and probabilities after their parents, each [B][N]."""

    sizes: tuple[int, ...]
    tokens: list[list[int]]
    parents: list[list[int]]
    steps: list[list[float]]


class _Open(NamedTuple):
    """A joined tree that is not yet verified."""

    length: int  # of the request's tokens before it
    place: dict[tuple[int, int], int]  # (parent, token) -> node
    votes: list[list[Vote]]  # by node; the largest probability first


class Votes:
    """Joins the trees of so many drafters, and learns from the text what their votes are worth.

    Attributes:
        calibrations: one for each drafter.
        weight: [drafters][drafters], weight of the second's vote where the first is the surer: 0 adds nothing to it, 1
            counts as independent.
    """

    def __init__(self, drafters: int) -> None:
        self.calibrations = [Calibration() for _ in range(drafters)]
        self.weight = [[WEIGHT_FIRST] * drafters for _ in range(drafters)]
        self._slopes = [[1.0] * drafters for _ in range(drafters)]  # sums of squared gradients
        self._open: ByRequest[_Open] = ByRequest()

    def join(self, requests: Sequence[Context], trees: Sequence[TokenTree], budgets: Sequence[int]) -> TokenTree:
        """The best `budgets[b]` draft tokens of all drafters for each request, best first.

        `trees` are those of each drafter. The source of drafter i's draft tokens is bit i, their log-probability that
        of the joined path.
        """
        drafted: list[_Proposed | None] = []
        for calibration, tree in zip(self.calibrations, trees, strict=True):
            if tree.width > 1:
                calibration.remember(requests, tree)
            drafted.append(_read(calibration, tree, requests) if tree.width > 1 else None)
        joined = [self._union(b, request, drafted) for b, request in enumerate(requests)]
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], joined, budgets)

    def _union(self, b: int, request: Context, drafted: Sequence[_Proposed | None]) -> Draft:
        """All draft tokens for a request, each path once, with the probability that the votes give it."""
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
            own_votes = votes[node]
            right = own_votes[0][0] if len(own_votes) == 1 else 1 - self._both_wrong(own_votes)
            logp.append(logp[parents[node]] + math.log(right))
        self._open[request.id] = _Open(len(request.tokens), place, votes)
        return (
            tokens[1:],
            [parent - 1 for parent in parents[1:]],
            logp[1:],
            [sum(1 << drafter for _, drafter in own_votes) for own_votes in votes[1:]],
        )

    def _both_wrong(self, votes: list[Vote]) -> float:
        """Probability that a token which several drafters draft is wrong; puts the surest of them first."""
        votes.sort(reverse=True)
        (surest, first), *others = votes
        weight = self.weight[first]
        wrong = 1 - surest
        for step, drafter in others:
            wrong *= (1 - step) ** weight[drafter]
        return wrong

    def compare(self, requests: Sequence[Context]) -> None:
        """Learn from the text that was emitted."""
        for calibration in self.calibrations:
            calibration.compare(requests)
        for request in requests:
            opened = self._open.pop(request.id, None)
            if opened is not None:
                self._learn(opened, request.tokens[opened.length :])

    def _learn(self, opened: _Open, text: list[int]) -> None:
        """A gradient step on the likelihood of the text, where several drafters drafted its next token."""
        right: int | None = 0
        for token in text:
            children = [(drafted, node) for (above, drafted), node in opened.place.items() if above == right]
            for drafted, node in children:
                if len(opened.votes[node]) > 1:
                    self._nudge(opened.votes[node], right=drafted == token)
            right = next((node for drafted, node in children if drafted == token), None)
            if right is None:
                return

    def _nudge(self, votes: list[Vote], *, right: bool) -> None:
        wrong = self._both_wrong(votes)
        (_, first), *others = votes
        for step, drafter in others:
            steepness = math.log(1 - step)  # of log(wrong), by the weight
            slope = steepness * (-wrong / max(1 - wrong, 1 - CERTAIN) if right else 1.0)
            slopes = self._slopes[first][drafter] = self._slopes[first][drafter] + slope * slope
            weight = min(max(self.weight[first][drafter] + LEARNING_RATE * slope / math.sqrt(slopes), 0.0), WEIGHT_MOST)
            self.weight[first][drafter] = self.weight[drafter][first] = weight
            self._slopes[drafter][first] = slopes

    def forget(self, request: Context) -> None:
        """The request is over; the rest of its text will not come."""
        for calibration in self.calibrations:
            calibration.forget(request)
        self._open.pop(request.id, None)


def _read(calibration: Calibration, tree: TokenTree, requests: Sequence[Context]) -> _Proposed:
    parents = tree.parents.numpy(force=True)
    paths = calibration.worth(tree, requests) * np.exp(TIE * tree.logp.numpy(force=True))
    paths[:, 0] = 1.0
    above = np.take_along_axis(paths, parents.clip(min=0), 1)
    steps = (paths / above.clip(min=LEAST)).clip(LEAST, CERTAIN)
    return _Proposed(tree.sizes, tree.tokens.tolist(), parents.tolist(), steps.tolist())
