"""ProPD's acceptance model: how often the truth was at a place of the tree, whatever the drafter thought of it.

A place is a depth and a rank among siblings (section 4.2.2). The paper counts, for each depth, how often the truth was
among the best k candidates, and multiplies these shares along a path. Candidates of one pass are made for the best
path alone, though: below any other node they hold far less often, and the product overrates them. So shares are kept
here for nodes below the best path and below other nodes apart, each given that its parent is right; the paper's
product is a switch. It needs no probabilities from the drafter; where there are good ones, `Calibration` knows more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from draftree.drafting.base import Context
from draftree.tree import TokenTree

DEPTHS, RANKS = 16, 16  # places told apart; what is beyond counts with the last
FIRST = 0.5  # share of the best rank before anything is known; of each next rank half of the one before
OFF_FIRST = 0.5  # the same below other than the best path, against below it
ALPHA = 0.02  # weight of a tree in the shares of its places
PRIOR = 4.0  # trees that the first shares count for
LEAST = 1e-4  # of a share
STRAY = 2**20  # marks a node that is not the best of its siblings, beside the count of steps


class _Places(NamedTuple):
    """Where the nodes of B trees of N nodes stand, all flat [B N].

    Attributes:
        up: the parent; roots and padding are their own.
        guess: whether it is a guess, neither root nor padding.
        depth: steps below the root.
        best: whether the parent lies on the best path.
        number: of the share that is the node's, 0 for what is no guess.
    """

    up: np.ndarray
    guess: np.ndarray
    depth: np.ndarray
    best: np.ndarray
    number: np.ndarray


class _Drafted(NamedTuple):
    """A tree whose text is still to come: the position behind its root, and its N nodes."""

    position: int
    tokens: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    best: np.ndarray
    number: np.ndarray


class ByRank:
    """Probability that a guess is walked, by depth, rank and whether its parent lies on the best path.

    Stands where `Calibration` does.

    Args:
        conditional: shares given that the parent is right, below the best path and elsewhere apart. False for the
            paper's product: shares of each depth by itself, wherever the walk ended, and the same below any parent.
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
        self._shares = shares.reshape(-1)
        self._trees = np.zeros(self._shares.shape)  # that a place was learned from
        self._logs: np.ndarray | None = None
        self._drafted: dict[int, deque[_Drafted]] = {}
        self._last: tuple[TokenTree, _Places] | None = None

    @property
    def waiting(self) -> bool:
        """Whether any tree's text is still to come."""
        return any(self._drafted.values())

    @property
    def within(self) -> np.ndarray:
        """P_i^k [2, depths, ranks]: share of cases with the truth among the best k + 1; below the best path, elsewhere.

        Given that the parent is right, where that is what is counted; without, both halves are the same.
        """
        shares = self._shares.reshape(2, DEPTHS, RANKS)
        return (shares if self.conditional else shares[[0, 0]]).cumsum(2)

    def worth(self, trees: TokenTree, requests: Sequence[Context] | None = None) -> np.ndarray:
        """[B, N], probability that each node is walked: the product of its path's shares; roots and padding get 0.

        Args:
            trees: B trees; their log-probabilities rank siblings and say nothing else.
            requests: theirs; not asked, as all texts share these shares.
        """
        places = self._of(trees)
        if self._logs is None:
            self._logs = np.log(self._shares.clip(LEAST, 1.0))
        paths = _along(np.where(places.guess, self._logs[places.number], 0.0), places.up)
        return np.where(places.guess, np.exp(paths), 0.0).reshape(trees.batch, trees.width)

    def weighed(self, trees: TokenTree) -> TokenTree:
        """The trees with these probabilities for their drafter's own, so that the best nodes are the best by them."""
        worth = self.worth(trees)
        worth[:, 0] = 1.0
        with np.errstate(divide="ignore"):
            logp = torch.from_numpy(np.log(worth).astype(np.float32)).to(trees.device)
        return replace(trees, logp=logp)

    def remember(self, requests: Sequence[Context], trees: TokenTree) -> None:
        """Keep each request's tree until its text has come."""
        places = self._of(trees)
        depth, best, number = (part.reshape(trees.batch, -1) for part in (places.depth, places.best, places.number))
        tokens, parents = trees.tokens.numpy(force=True), trees.parents.numpy(force=True)
        for b, (request, size) in enumerate(zip(requests, trees.sizes, strict=True)):
            if size > 1:
                parts = (part[b, :size] for part in (tokens, parents, depth, best, number))
                self._drafted.setdefault(request.id, deque()).append(_Drafted(len(request.tokens), *parts))

    def compare(self, requests: Sequence[Context]) -> set[int]:
        """Learn from trees whose text has come as far as they need it; the ids of requests with a right guess."""
        compared = _given_the_parent if self.conditional else _by_depth
        with_right: set[int] = set()
        for request in requests:
            waiting = self._drafted.get(request.id)
            while waiting:
                found = compared(waiting[0], request.tokens)
                if found is None:
                    break
                waiting.popleft()
                asked, right = found
                self._learn(asked, right)
                if len(right):
                    with_right.add(request.id)
        return with_right

    def forget(self, request: Context) -> None:
        """The request is over; the rest of its text will not come."""
        self._drafted.pop(request.id, None)

    def _learn(self, asked: np.ndarray, right: np.ndarray) -> None:
        """Shares of these numbers were asked, and of them these were right."""
        seen = np.bincount(asked, minlength=len(self._shares))
        at = np.flatnonzero(seen)
        seen = seen[at]
        came = np.bincount(right, minlength=len(self._shares))[at]
        self._trees[at] += seen
        weight = np.maximum(1 - (1 - self.alpha) ** seen, seen / (PRIOR + self._trees[at]))
        self._shares[at] += weight * (came / seen - self._shares[at])
        self._logs = None

    def _of(self, trees: TokenTree) -> _Places:
        """Remembering and weighing ask for the same trees one after the other."""
        last = self._last  # read once: another thread may put its own
        if last is None or last[0] is not trees:
            last = self._last = (trees, _places(trees, apart=self.conditional))
        return last[1]


def _places(trees: TokenTree, *, apart: bool) -> _Places:
    """Where nodes stand; `apart` gives those whose parent is off the best path shares of their own."""
    own = np.arange(trees.batch * trees.width)
    parents = trees.parents.numpy(force=True)
    guess = parents.reshape(-1) >= 0
    up = np.where(guess, (parents + own[:: trees.width, None]).reshape(-1), own)
    # Siblings side by side, the likeliest first; what is no guess comes behind all, as its own sibling.
    order = np.lexsort((np.where(guess, -trees.logp.numpy(force=True).reshape(-1), np.inf), up))
    family = up[order]
    first = np.maximum.accumulate(np.where(np.diff(family, prepend=-1) != 0, own, 0))
    rank = np.empty_like(own)
    rank[order] = own - first
    stray = guess & (rank > 0)
    steps = _along(guess + stray * STRAY, up)
    depth = steps % STRAY
    best = guess & (steps - stray * STRAY < STRAY)
    number = (depth.clip(1, DEPTHS) - 1) * RANKS + rank.clip(max=RANKS - 1)
    if apart:
        number += (guess & ~best) * (DEPTHS * RANKS)
    return _Places(up, guess, depth, best, np.where(guess, number, 0))


def _along(values: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Sums of values [B N] (0 for what is no guess) from below the root to each node, by pointer jumping."""
    while True:
        values = values + values[up]
        further = up[up]
        if (further == up).all():
            return values
        up = further


def _given_the_parent(drafted: _Drafted, text: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Numbers of the guesses whose parent is right, and of those that are right themselves.

    None where more text may confirm more.
    """
    right = np.zeros(len(drafted.tokens), bool)
    right[0] = True
    asked = below = drafted.parents == 0
    for token in text[drafted.position :]:
        reached = below & (drafted.tokens == token)
        if not reached.any():
            below = reached
            break
        right |= reached
        below = reached[drafted.parents]
        below[0] = False  # the root's parent, -1, reads the last node
        asked = asked | below
    if below.any():
        return None
    right[0] = False
    return drafted.number[asked], drafted.number[right]


def _by_depth(drafted: _Drafted, text: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """The same for the candidates of each depth, those below the best path, whether or not that path is right.

    None where the text does not reach the deepest of them.
    """
    depth = drafted.depth[drafted.best]
    came = np.array(text[drafted.position : drafted.position + int(depth.max())])
    if len(came) < depth.max():
        return None
    number = drafted.number[drafted.best]
    return number, number[drafted.tokens[drafted.best] == came[depth - 1]]
