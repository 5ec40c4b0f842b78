"""Grow trees depth by depth: the likeliest nodes of a depth are read in one pass, and their best children offered.

The trees of a small model and of heads that read their own output (EAGLE-3, MTP) grow this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftree.drafting.base import RequestState
from draftree.tree import Draft, TokenTree

Best = tuple[np.ndarray, np.ndarray]  # tokens [B, n, K] and their log-probabilities
Nodes = tuple[list[int], list[int]]  # tokens of a request's new nodes, and the number of the node above each


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a tree.

    Attributes:
        beam: most nodes of a depth that are read.
        confidence: stop where the nodes to be read next have less than this probability together; 0: never.
        source: bit that marks the drafter's nodes.
    """

    beam: int
    confidence: float
    source: int


def grow_trees(
    requests: Sequence[RequestState],
    budgets: Sequence[int],
    reaches: Sequence[int],
    limits: Limits,
    first: Callable[[], Best],
    more: Callable[[Sequence[Nodes], int], Best],
) -> TokenTree:
    """Return a tree for each request.

    Args:
        requests, budgets: of `Drafter.draft`.
        reaches: most depths of each request; 0 for no draft.
        limits: of all trees.
        first: returns the best tokens behind each request's newest token, n = 1.
        more: reads nodes of each request at a depth from 1 on, and returns the best tokens behind them. Nodes are
            numbered by request in the order in which they are read; -1 is the newest token.
    """
    growths = [
        _Growth(budget, limits.beam, request.eos_token_ids) for request, budget in zip(requests, budgets, strict=True)
    ]
    frontiers: list[list[int]] = [[-1] if reach > 0 else [] for reach in reaches]
    for depth in range(max(reaches)):
        if depth > 0:
            grown = zip(growths, reaches, strict=True)
            frontiers = [growth.frontier(limits.confidence) if reach > depth else [] for growth, reach in grown]
            if not any(frontiers):
                break
        if depth == 0:
            tokens, logp = first()
        else:
            tokens, logp = more([g.read(frontier) for g, frontier in zip(growths, frontiers, strict=True)], depth)
        for b, (growth, frontier) in enumerate(zip(growths, frontiers, strict=True)):
            for i, above in enumerate(frontier):
                growth.offer(above, tokens[b, i].tolist(), logp[b, i].tolist())
    drafts: list[Draft] = [(growth.tokens, growth.parents, growth.logp, limits.source) for growth in growths]
    return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)


class _Growth:
    """One request's growing tree: all candidates; those of the last depth start at `newest`."""

    def __init__(self, budget: int, beam: int, ends: Sequence[int]) -> None:
        self.budget, self.beam, self._ends = budget, beam, ends
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.logp: list[float] = []
        self.newest = 0  # first candidate of the last depth
        self._rows: dict[int, int] = {-1: -1}  # candidate -> its number among the nodes that were read

    def offer(self, above: int, tokens: list[int], logp: list[float]) -> None:
        """Add candidates behind node `above` (-1: the root), with their log-probabilities."""
        base = 0.0 if above < 0 else self.logp[above]
        self.tokens += tokens
        self.parents += [above] * len(tokens)
        self.logp += [base + value for value in logp]

    def frontier(self, confidence: float) -> list[int]:
        """Return the nodes to be read next: those of the last depth whose children can be among the best of the tree.

        None of them if they have less than the probability `confidence` together.
        """
        lowest = sorted(self.logp, reverse=True)[self.budget - 1] if len(self.logp) >= self.budget else -math.inf
        last = range(self.newest, len(self.logp))
        fit = [i for i in last if self.logp[i] > lowest and self.tokens[i] not in self._ends]
        self.newest = len(self.logp)
        best = sorted(fit, key=self.logp.__getitem__, reverse=True)[: self.beam]
        return best if sum(math.exp(self.logp[node]) for node in best) >= confidence else []

    def read(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of `nodes` and their parents, in the small model's numbering."""
        parents = [self._rows[self.parents[node]] for node in nodes]
        for node in nodes:
            self._rows[node] = len(self._rows) - 1
        return [self.tokens[node] for node in nodes], parents
