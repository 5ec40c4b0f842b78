"""One tree of several drafters' trees: their probabilities are calibrated, then those for one token are combined.

A trie's hit counts and a head's softmax cannot be compared as they are. So each drafter's path probabilities are first
turned into shares of draft tokens that were accepted (`Calibration`), and read as probabilities of a token after its
parent. Where two drafters draft the same token, the chance that both are wrong is taken to be the product of theirs, as
if they knew different things: how far that holds of a pair can be learned, and over six merges of the embedded model's
drafters with 4, 8 and 16 nodes that accepted 0.1 % more tokens. The larger of the two would leave agreement unused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafting.base import RequestState
from draftree.drafting.merge.calibration import Calibration
from draftree.tree import Draft, TokenTree
from draftree.tree.structure import check_parents

TIE = 0.02  # weight of a drafter's own log-probability: keeps its order where calibration sees no difference
LEAST, CERTAIN = 1e-6, 0.999  # probabilities of a token after its parent

Vote = tuple[float, int]  # probability of a token after its parent, and the number of the drafter that claims it


class _Proposed(NamedTuple):
    """One drafter's trees: its nodes' tokens, parents, and probabilities after their parents, each [B][N]."""

    sizes: tuple[int, ...]
    tokens: list[list[int]]
    parents: list[list[int]]
    steps: list[list[float]]


class Votes:
    """Joins the trees of so many drafters, and learns from the text what their votes are worth.

    Attributes:
        calibrations: one for each drafter.
    """

    def __init__(self, drafters: int) -> None:
        self.calibrations = [Calibration() for _ in range(drafters)]

    def join(self, requests: Sequence[RequestState], trees: Sequence[TokenTree], budgets: Sequence[int]) -> TokenTree:
        """The best `budgets[b]` draft tokens of all drafters for each request, best first.

        `trees` are those of each drafter. The source of drafter i's draft tokens is bit i, their log-probability that
        of the joined path.
        """
        drafted: list[_Proposed | None] = []
        for calibration, tree in zip(self.calibrations, trees, strict=True):
            if tree.width > 1:
                calibration.remember(requests, tree)
            drafted.append(_read(calibration, tree, requests) if tree.width > 1 else None)
        joined = [_union(b, drafted) for b in range(len(requests))]
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], joined, budgets)

    def compare(self, requests: Sequence[RequestState]) -> None:
        """Learn from the text that was emitted."""
        for calibration in self.calibrations:
            calibration.compare(requests)

    def forget(self, request: RequestState) -> None:
        """The request is over; the rest of its text will not come."""
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
    """All draft tokens for request b, each path once, with the probability that the votes give it."""
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
