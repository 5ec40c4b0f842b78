"""Ways down a tree: which draft tokens the model accepts, and the nodes that lead to one.

`longest_match` and `path_nodes` run in every step and use the ancestor mask in place of walking; the rest
serves one tree on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.tree.arrays import TreeArrays
from draftree.tree.structure import any_above


def longest_match(tree: TreeArrays, next_tokens: Tensor) -> Tensor:
    above = tree.parents.clamp(min=0)
    missed = next_tokens.gather(1, above) != tree.tokens
    missed[:, 0] = False
    refused = any_above(tree.structure, missed)
    # Padding may agree with a live token 0, but at depth 0, where argmax meets the root first.
    return tree.depth.masked_fill(refused, -1).argmax(1)


def path_nodes(tree: TreeArrays, node: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.arange(tree.batch, device=tree.device)
    on_path = tree.ancestors[rows, node]
    # Parents come before children, so the path is the set of ancestors in index order.
    place = on_path.cumsum(1)
    lengths = place[:, -1]
    width = tree.height + 1
    nodes = torch.full((tree.batch, width + 1), -1, dtype=torch.long, device=tree.device)
    ids = torch.arange(tree.width, device=tree.device).expand(tree.batch, -1)
    nodes.scatter_(1, torch.where(on_path, place - 1, width), ids)
    return nodes[:, :width], lengths


def path(tree: TreeArrays, b: int, node: int) -> list[int]:
    if not 0 <= node < tree.sizes[b]:
        raise IndexError(f"Tree {b} has nodes 0..{tree.sizes[b] - 1}, not {node}.")
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    found = []
    while node >= 0:
        found.append(tokens[node])
        node = parents[node]
    return found[::-1]


def children(tree: TreeArrays, b: int, node: int) -> list[int]:
    return [i for i, parent in enumerate(tree.parents[b, : tree.sizes[b]].tolist()) if parent == node >= 0]


def walk(tree: TreeArrays, b: int, tokens: Sequence[int]) -> list[int]:
    known = tree.tokens[b, : tree.sizes[b]].tolist()
    parents = tree.parents[b, : tree.sizes[b]].tolist()
    # Siblings may share a token, so several walks can be alive at once.
    reached = {0: [0]}
    for token in tokens:
        below = {
            i: [*reached[parent], i] for i, parent in enumerate(parents) if parent in reached and known[i] == token
        }
        if not below:
            break
        reached = below
    return reached[min(reached)]


def choices(tree: TreeArrays, b: int) -> list[tuple[int, ...]]:
    parents = tree.parents[b, : tree.sizes[b]].tolist()
    logp = tree.logp[b, : tree.sizes[b]].tolist()
    rank: dict[int, int] = {}
    siblings: dict[int, int] = {}
    for i in sorted(range(1, len(parents)), key=lambda i: (-logp[i], i)):
        rank[i] = siblings.get(parents[i], 0)
        siblings[parents[i]] = rank[i] + 1
    named: list[tuple[int, ...]] = [()]
    for i in range(1, len(parents)):
        named.append((*named[parents[i]], rank[i]))
    return named[1:]
