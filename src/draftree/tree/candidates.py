"""Trees from per-depth candidates: a choice list filled in, or the best nodes of the full product tree.

A static list costs one gather, as its shape is worked out once; the best-first tree is grown with a heap on the CPU.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from draftree.tree.layout import NOTHING
from draftree.tree.structure import Structure, structure_of

Choices = Sequence[Sequence[int]]


def ordered(choices: Choices) -> list[tuple[int, ...]]:
    """Return the nodes of a choice list, each once, by depth and ranks.

    Raises:
        ValueError: a node that is none, or one whose parent is missing.
    """
    nodes = sorted({tuple(int(rank) for rank in node) for node in choices}, key=lambda node: (len(node), node))
    known = {(), *nodes}
    for node in nodes:
        if not node or min(node) < 0:
            raise ValueError(f"{node} is no choice: name a node by its ranks (>= 0) from the root, as (0, 2).")
        if node[:-1] not in known:
            raise ValueError(f"The choice list has {node} but not its prefix {node[:-1]}: add the prefix.")
    return nodes


@lru_cache(maxsize=256)
def choice_structure(choices: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor, Structure, int]:
    """Return depth index, rank and parent of each node of a choice list, with its structure and largest rank."""
    order = ordered(choices)
    place = {(): 0} | {choice: i for i, choice in enumerate(order, 1)}
    depths = torch.tensor([len(c) - 1 for c in order], dtype=torch.long, device="cpu")
    ranks = torch.tensor([c[-1] for c in order], dtype=torch.long, device="cpu")
    parents = torch.tensor([[-1, *(place[c[:-1]] for c in order)]], dtype=torch.long, device="cpu")
    return depths, ranks, parents, structure_of(parents), max((c[-1] for c in order), default=-1)


def best_first(
    ids: list[list[int]], scores: list[list[float]], budget: int, off_path: float = 1.0
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents (-1: the root) and log-probabilities of one tree, best first.

    A heap holds the best node not yet taken below each taken parent: n nodes cost n pops and 2 n pushes.
    """
    levels = [_distinct(*level) for level in zip(ids, scores, strict=True)]
    penalty = math.log(off_path)
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[float] = []
    # Of each node: the sum of log-probabilities on its path without the penalty, how many of its steps are below a
    # second choice, and whether its path has one.
    known: dict[int, tuple[float, int, bool]] = {-1: (0.0, 0, False)}
    heap: list[tuple[float, int, int, int]] = []

    def offer(parent: int, depth: int, rank: int) -> None:
        if depth < len(levels) and rank < len(levels[depth]):
            total, strays, stray = known[parent]
            score = total + levels[depth][rank][1] + (strays + stray) * penalty
            heapq.heappush(heap, (-score, depth, parent, rank))

    offer(-1, 0, 0)
    while heap and len(tokens) < budget:
        cost, depth, parent, rank = heapq.heappop(heap)
        token, logp = levels[depth][rank]
        total, strays, stray = known[parent]
        known[len(tokens)] = total + logp, strays + stray, stray or rank > 0
        tokens.append(token)
        parents.append(parent)
        paths.append(-cost)
        offer(parent, depth, rank + 1)
        offer(len(tokens) - 1, depth + 1, 0)
    return tokens, parents, paths


def _distinct(ids: list[int], scores: list[float]) -> list[tuple[int, float]]:
    """Return the possible tokens of one depth, likeliest first, each once."""
    best: dict[int, float] = {}
    for score, token in sorted(zip(scores, ids, strict=True), key=lambda each: -each[0]):
        if score > NOTHING:
            best.setdefault(token, score)
    return list(best.items())
