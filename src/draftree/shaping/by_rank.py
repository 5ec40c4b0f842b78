"""ProPD's acceptance model: how often the truth was at a place of the tree, whatever the drafter thought of it.

A place is a depth and a rank among siblings (section 4.2.2). The paper counts, for each depth, how often the truth was
among the best k candidates, and multiplies these shares along a path. Candidates of one pass are made for the best
path alone, though: below any other node they hold far less often, and the product overrates them. So shares are kept
here for nodes below the best path and below other nodes apart, each given that its parent is right; the paper's
product is a switch. It needs no probabilities from the drafter; where there are good ones, a `Ledger` knows more.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from draftree.drafting.base import ByRequest, Context
from draftree.tree import TokenTree

DEPTHS, RANKS = 16, 16  # places that are counted apart; what is beyond counts with the last
FIRST = 0.5  # share of the best rank before anything is known; of each next rank half of the one before
OFF_FIRST = 0.5  # the same below other than the best path, against below it
ALPHA = 0.02  # weight of a tree in the shares of its places
PRIOR = 4.0  # trees that the first shares count for
LEAST = 1e-4  # of a share


class _Awaiting(NamedTuple):
    """A tree whose text is still to come.

    Attributes:
        position: of the token behind its root.
        tokens, parents: of its N nodes.
        depth: steps below the root.
        best: whether the parent lies on the best path.
        number: of the share that is the node's; 0 for the root, which has none.
    """

    position: int
    tokens: list[int]
    parents: list[int]
    depth: list[int]
    best: list[bool]
    number: list[int]


class ByRank:
    """Probability that a draft token is accepted, by depth, rank and whether its parent lies on the best path.

    Args:
        conditional: shares given that the parent is right, below the best path and elsewhere apart. False for the
            paper's product: shares of each depth by itself, whatever was accepted, and the same below any parent.
        alpha: weight of a new tree in the moving averages; the first trees weigh more.
        accuracies: accuracies[d][r], share of cases where rank r at depth d + 1 is the truth, if it was measured.

    Raises:
        ValueError: `alpha` outside 0 .. 1, or shares that are none.
    """

    def __init__(
        self,
        *,
        conditional: bool = True,
        alpha: float = ALPHA,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha is {alpha}: give the weight of a new tree, over 0 and at most 1.")
        self.conditional, self.alpha = conditional, alpha
        shares = np.tile(FIRST * 0.5 ** np.arange(RANKS), (2, DEPTHS, 1))
        shares[1] *= OFF_FIRST
        for d, ranks in enumerate((accuracies or ())[:DEPTHS]):
            if any(not 0 <= share <= 1 for share in ranks) or sum(ranks) > 1 + 1e-6:
                raise ValueError("accuracies are shares of cases, one list of ranks per depth: no list exceeds 1.")
            known = np.array(ranks[:RANKS])
            shares[0, d] = np.pad(known, (0, RANKS - len(known)))
            shares[1, d] = shares[0, d] * (OFF_FIRST if conditional else 1.0)
        self._shares: list[float] = shares.reshape(-1).tolist()
        self._trees = [0] * len(self._shares)  # that a place was learned from
        self._drafted: ByRequest[deque[_Awaiting]] = ByRequest()

    @property
    def within(self) -> np.ndarray:
        """P_i^k [2, depths, ranks]: share of cases with the truth among the best k + 1; below the best path, elsewhere.

        Given that the parent is right, where that is what is counted; without, both halves are the same.
        """
        shares = np.reshape(self._shares, (2, DEPTHS, RANKS))
        return (shares if self.conditional else shares[[0, 0]]).cumsum(2)

    def worth(self, trees: TokenTree, requests: Sequence[Context] | None = None) -> np.ndarray:
        """[B, N], probability that each node is accepted: the product of its path's shares; roots and padding get 0.

        Args:
            trees: B trees; their log-probabilities rank siblings and say nothing else.
            requests: theirs, as `Calibration.worth` takes them; all texts share these shares.
        """
        worth = np.zeros((trees.batch, trees.width))
        for b, drafted in enumerate(self._places(trees)):
            path = [1.0]
            for number, parent in zip(drafted.number[1:], drafted.parents[1:], strict=True):
                path.append(path[parent] * min(max(self._shares[number], LEAST), 1.0))
            worth[b, 1 : len(path)] = path[1:]
        return worth

    def weighed(self, trees: TokenTree) -> TokenTree:
        """The trees with these probabilities for their drafter's own, so that the best nodes are the best by them."""
        worth = self.worth(trees)
        worth[:, 0] = 1.0
        with np.errstate(divide="ignore"):
            logp = torch.from_numpy(np.log(worth).astype(np.float32))
        return replace(trees, logp=logp.to(trees.device))

    def remember(self, requests: Sequence[Context], trees: TokenTree) -> None:
        """Keep each request's tree until its text has come."""
        for request, drafted in zip(requests, self._places(trees), strict=True):
            if len(drafted.tokens) > 1:
                own = self._drafted.setdefault(request.id, deque())
                own.append(drafted._replace(position=len(request.tokens)))

    def compare(self, requests: Sequence[Context]) -> set[int]:
        """Learn from trees whose text has come as far as they need it; the ids of requests with a right draft token."""
        compared = _given_the_parent if self.conditional else _by_depth
        with_right: set[int] = set()
        for request in requests:
            waiting = self._drafted.get(request.id)
            while waiting:
                found = compared(waiting[0], request.tokens)
                if found is None:
                    break
                offered, right = ([waiting[0].number[node] for node in nodes] for nodes in found)
                waiting.popleft()
                self._learn(offered, right)
                if right:
                    with_right.add(request.id)
        return with_right

    def forget(self, request: Context) -> None:
        """The request is over; the rest of its text will not come."""
        self._drafted.pop(request.id, None)

    def _learn(self, offered: Sequence[int], right: Sequence[int]) -> None:
        """Shares of these numbers had a draft token, and of those these were right."""
        came = Counter(right)
        for number, seen in Counter(offered).items():
            self._trees[number] += seen
            weight = max(1 - (1 - self.alpha) ** seen, seen / (PRIOR + self._trees[number]))
            self._shares[number] += weight * (came[number] / seen - self._shares[number])

    def _places(self, trees: TokenTree) -> list[_Awaiting]:
        """Where the nodes of each tree stand, padding left out; positions are still to be filled in."""
        columns = (trees.tokens.tolist(), trees.parents.tolist(), trees.logp.tolist())
        found = []
        for tokens, parents, logp, size in zip(*columns, trees.sizes, strict=True):
            families: dict[int, list[int]] = defaultdict(list)
            for node in range(1, size):
                families[parents[node]].append(node)
            rank = [0] * size
            for siblings in families.values():
                for place, node in enumerate(sorted(siblings, key=lambda node: -logp[node])):
                    rank[node] = place
            depth, on_best, best, number = [0] * size, [True] * size, [False] * size, [0] * size
            for node in range(1, size):
                above = parents[node]
                depth[node], best[node] = depth[above] + 1, on_best[above]
                on_best[node] = best[node] and rank[node] == 0
                number[node] = (min(depth[node], DEPTHS) - 1) * RANKS + min(rank[node], RANKS - 1)
                if self.conditional and not best[node]:
                    number[node] += DEPTHS * RANKS
            found.append(_Awaiting(0, tokens[:size], parents[:size], depth, best, number))
        return found


_Found = tuple[Iterable[int], Iterable[int]] | None  # nodes that were offered, and of those the right ones


def _given_the_parent(drafted: _Awaiting, text: Sequence[int]) -> _Found:
    """Nodes whose parent is right, and of those the ones that are right themselves.

    None where more text may confirm more.
    """
    offered: list[int] = []
    right: list[int] = []
    reached, place = {0}, drafted.position
    while below := [node for node, parent in enumerate(drafted.parents) if parent in reached]:
        if place >= len(text):
            return None
        offered += below
        reached = {node for node in below if drafted.tokens[node] == text[place]}
        right += reached
        place += 1
    return offered, right


def _by_depth(drafted: _Awaiting, text: Sequence[int]) -> _Found:
    """The same for the candidates of each depth, those below the best path, whether or not that path is right.

    None where the text does not reach the deepest of them.
    """
    nodes = [node for node, best in enumerate(drafted.best) if best]
    came = text[drafted.position :]
    if len(came) < max(drafted.depth[node] for node in nodes):
        return None
    return nodes, [node for node in nodes if drafted.tokens[node] == came[drafted.depth[node] - 1]]
