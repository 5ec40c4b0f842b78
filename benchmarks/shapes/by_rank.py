"""ProPD's acceptance model: the share of trees in which the truth was at a place, whatever the drafter's probability.

A place is a depth and a rank among siblings (section 4.2.2). The paper counts, for each depth, how often the truth was
among the best k candidates, and multiplies these shares along a path. Candidates of one pass are made for the best
path alone, though: below any other node they hold far less often, and the product overrates them. So shares are kept
here for nodes below the best path and below other nodes apart, each given that its parent is right; the paper's
product is a switch. It needs no probabilities from the drafter; where there are good ones, `AcceptanceStatistics`
knows more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafting.base import ByRequest, RequestState
from draftree.tree import TokenTree

DEPTHS, RANKS = 16, 16  # counted separately; deeper and later places count with the last one
FIRST = 0.5  # initial share of the best rank; each next rank has half of the one before
OFF_FIRST = 0.5  # factor of the initial shares below other nodes than the best path
ALPHA = 0.02  # weight of a tree in the shares of its places
PRIOR = 4.0  # weight of the initial shares, in trees
LEAST = 1e-4  # of a share


Place = tuple[int, int, int]  # 0 below the best path and 1 elsewhere; depth and rank, from 0


class _Awaiting(NamedTuple):
    """A tree whose text is not complete yet."""

    position: int  # of the token behind its root
    # tokens, parents: of its N nodes.
    tokens: list[int]
    parents: list[int]
    depth: list[int]  # steps below the root
    best: list[bool]  # whether the parent lies on the best path
    place: list[Place]  # of the share that is the node's; the root has none, and the first one stands for it


class ByRank:
    """Probability that a draft token is accepted, by depth, rank and whether its parent lies on the best path.

    Args:
        conditional: shares given that the parent is right, below the best path and elsewhere apart. False for the
            paper's product: shares of each depth by itself, whatever was accepted, and the same below any parent.

    Attributes:
        alpha: weight of a new tree in the moving averages; the first trees weigh more.
        shares: [2, depths, ranks], how often the truth was at a place; below the best path, and elsewhere.
    """

    def __init__(self, *, conditional: bool = True) -> None:
        self.conditional, self.alpha = conditional, ALPHA
        self.shares = np.tile(FIRST * 0.5 ** np.arange(RANKS), (2, DEPTHS, 1))
        self.shares[1] *= OFF_FIRST
        self._trees: Counter[Place] = Counter()  # that a place was learned from
        self._drafted: ByRequest[deque[_Awaiting]] = ByRequest()

    def worth(self, trees: TokenTree, requests: Sequence[RequestState] | None = None) -> np.ndarray:
        """Return [B, N], the product of the shares along each node's path; roots and padding get 0.

        Args:
            trees: B trees; their log-probabilities rank siblings and say nothing else.
            requests: unused, because all texts share these shares.
        """
        worth = np.zeros((trees.batch, trees.width))
        for b, drafted in enumerate(self._places(trees)):
            path = [1.0]
            for place, parent in zip(drafted.place[1:], drafted.parents[1:], strict=True):
                path.append(path[parent] * min(max(float(self.shares[place]), LEAST), 1.0))
            worth[b, 1 : len(path)] = path[1:]
        return worth

    def remember(self, requests: Sequence[RequestState], trees: TokenTree) -> None:
        """Keep each request's tree until its text is complete."""
        for request, drafted in zip(requests, self._places(trees), strict=True):
            if len(drafted.tokens) > 1:
                own = self._drafted.setdefault(request.id, deque())
                own.append(drafted._replace(position=len(request.tokens)))

    def compare(self, requests: Sequence[RequestState]) -> None:
        """Learn from trees whose text is complete."""
        compared = _given_the_parent if self.conditional else _by_depth
        for request in requests:
            waiting = self._drafted.get(request.id)
            while waiting:
                found = compared(waiting[0], request.tokens)
                if found is None:
                    break
                offered, right = ([waiting[0].place[node] for node in nodes] for nodes in found)
                waiting.popleft()
                self._learn(offered, right)

    def forget(self, request: RequestState) -> None:
        """Drop the trees of a finished request."""
        self._drafted.pop(request.id, None)

    def _learn(self, offered: Sequence[Place], right: Sequence[Place]) -> None:
        """Count places with a draft token, and those of them that were right."""
        came = Counter(right)
        for place, seen in Counter(offered).items():
            self._trees[place] += seen
            weight = max(1 - (1 - self.alpha) ** seen, seen / (PRIOR + self._trees[place]))
            self.shares[place] += weight * (came[place] / seen - self.shares[place])

    def _places(self, trees: TokenTree) -> list[_Awaiting]:
        """Return the places of each tree's nodes without padding; positions are filled in later."""
        columns = (trees.tokens.tolist(), trees.parents.tolist(), trees.depth.tolist(), trees.logp.tolist())
        found = []
        for tokens, parents, depth, logp, size in zip(*columns, trees.sizes, strict=True):
            rank, siblings = [0] * size, Counter[int]()
            for node in sorted(range(1, size), key=lambda node: -logp[node]):
                rank[node] = siblings[parents[node]]
                siblings[parents[node]] += 1
            on_best, best, place = [True] * size, [False] * size, [(0, 0, 0)] * size
            for node in range(1, size):
                best[node] = on_best[parents[node]]
                on_best[node] = best[node] and rank[node] == 0
                off = int(self.conditional and not best[node])
                place[node] = off, min(depth[node], DEPTHS) - 1, min(rank[node], RANKS - 1)
            found.append(_Awaiting(0, tokens[:size], parents[:size], depth[:size], best, place))
        return found


_Found = tuple[Iterable[int], Iterable[int]] | None  # nodes that were offered, and of those the right ones


def _given_the_parent(drafted: _Awaiting, text: Sequence[int]) -> _Found:
    """Nodes whose parent is right, and of those the ones that are right themselves.

    None where more text may confirm more.
    """
    offered: list[int] = []
    right: list[int] = []
    found = [0]
    for token in text[drafted.position :]:
        below = [node for node, parent in enumerate(drafted.parents) if parent in found]
        if not below:
            break
        found = [node for node in below if drafted.tokens[node] == token]
        offered += below
        right += found
    return (offered, right) if set(found).isdisjoint(drafted.parents) else None


def _by_depth(drafted: _Awaiting, text: Sequence[int]) -> _Found:
    """Return the same for the candidates of each depth, those below the best path, whether or not that path is right.

    None where the text does not reach the deepest of them.
    """
    nodes = [node for node, best in enumerate(drafted.best) if best]
    came = text[drafted.position :]
    if len(came) < max(drafted.depth[node] for node in nodes):
        return None
    return nodes, [node for node in nodes if drafted.tokens[node] == came[drafted.depth[node] - 1]]
