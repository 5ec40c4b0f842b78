"""Trees from the candidates of each depth: a choice list filled in, or the best nodes of the full product tree.

A choice list names a tree, as in Medusa and EAGLE: a node is the tuple of ranks that leads to it, so (0, 2) is the
third candidate of depth 2 below the best of depth 1. Filling it costs one gather, as its shape is worked out once; the
best-first tree is grown with a heap on the CPU."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from draftree.errors import LARGEST, brief
from draftree.tree.structure import NOTHING, Structure, structure_of

Choices = list[tuple[int, ...]]
NAMES = "'best-first', 'chain', 'full-K', 'efficient-K' or 'efficient-code-K' (K siblings)"


def ordered(choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the nodes of a choice list, each once, by depth and ranks."""
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


def chain(depth: int) -> Choices:
    """Return the best candidate of each depth: one branch (BPD; BiTA's straightforward decoding)."""
    return [(0,) * d for d in range(1, depth + 1)]


def full(k: int, depth: int) -> Choices:
    """Return every combination of the best `k` of each depth: k + k^2 + .. + k^depth nodes (BiTA, section 3.2)."""
    return [node for d in range(1, depth + 1) for node in itertools.product(range(k), repeat=d)]


def efficient(k: int, depth: int, *, fewer: bool = False) -> Choices:
    """Return BiTA's efficient tree (section 3.2, Figure 5): only the best candidate of each depth has children.

    There are `k` siblings at every depth; or k, k - 1, k - 2, .. as in the authors' code, where they are `fewer`.
    """
    nodes: Choices = []
    for d in range(depth):
        siblings = max(k - d, 1) if fewer else k
        nodes += [(*(0,) * d, rank) for rank in range(siblings)]
    return nodes


def best_choices(accuracies: Sequence[Sequence[float]], node_budget: int) -> Choices:
    """Return the tree of `node_budget` draft tokens with most accepted on average (Medusa, section 2.3.3).

    Args:
        accuracies: accuracies[d][r], measured share of cases where rank r at depth d + 1 is the truth. A path's
            probability is taken to be the product along it, and a tree's worth the sum over its nodes.
        node_budget: draft tokens; fewer come back where there are no more combinations of worth.

    Raises:
        ValueError: a budget under 1, or shares outside 0 .. 1.
    """
    if node_budget < 1:
        raise ValueError(f"node_budget is {node_budget}: a tree needs 1 draft token or more.")
    if any(not 0 <= share <= 1 for ranks in accuracies for share in ranks):
        raise ValueError("accuracies are shares of cases between 0 and 1, one list of ranks per depth.")
    ranks = [list(range(len(shares))) for shares in accuracies]
    logs = [[math.log(share) if share else NOTHING for share in shares] for shares in accuracies]
    nodes: Choices = []
    for rank, parent, _ in zip(*best_first(ranks, logs, node_budget), strict=True):
        nodes.append((rank,) if parent < 0 else (*nodes[parent], rank))
    return ordered(nodes)


def choices_named(tree: str | Sequence[Sequence[int]], depth: int) -> Choices:
    """Return the choice list that an option names, or the list itself, checked.

    Args:
        tree: "chain", "full-K", "efficient-K", "efficient-code-K", or a choice list.
    """
    if isinstance(tree, str):
        found = re.fullmatch(r"(chain)|(full|efficient|efficient-code)-([1-9][0-9]*)", tree)
        if found is None:
            raise ValueError(f"tree is {brief(repr(tree))}: choose {NAMES}, or give a choice list.")
        if found[1]:
            return chain(depth)
        k = min(int(found[3][:9]), LARGEST + 1)
        if (k**depth if found[2] == "full" else k * depth) > LARGEST:
            raise ValueError(
                f"tree is {brief(repr(tree))}, of {depth} levels: take fewer siblings, for at most {LARGEST} nodes."
            )
        return full(k, depth) if found[2] == "full" else efficient(k, depth, fewer="code" in found[2])
    nodes = ordered(tree)
    if len(nodes) > LARGEST:
        raise ValueError(f"The choice list has {len(nodes)} nodes: give at most {LARGEST}.")
    if not nodes:
        raise ValueError("The choice list is empty: name at least one node, such as (0,), or use no drafter.")
    if len(nodes[-1]) > depth:
        raise ValueError(f"The choice list has {nodes[-1]}, and the drafter drafts {depth} deep: shorten the list.")
    return nodes
