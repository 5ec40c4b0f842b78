"""Static trees: shapes fixed beforehand, filled each step with candidates per depth.

A tree is named by its choice list, as in Medusa and EAGLE: a node is the tuple of ranks that leads to it, so (0, 2)
is the third candidate of depth 2 below the best of depth 1. `TokenTree.from_choices` fills a list in one gather.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from draftree.errors import LARGEST, brief
from draftree.tree.candidates import best_first, ordered
from draftree.tree.layout import NOTHING

Choices = list[tuple[int, ...]]
NAMES = "'best-first', 'chain', 'full-K', 'efficient-K' or 'efficient-code-K' (K siblings)"


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
        depth: of the candidates.

    Raises:
        ValueError: an unknown name, more than 4096 nodes, or a list that is empty, deeper than the candidates or lacks
            a prefix.
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
