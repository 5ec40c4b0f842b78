"""Greedy acceptance: of every tree the deepest node that the model's own choices lead to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftree.acceptance.base import AcceptedPath
from draftree.tree import TokenTree


def greedy_paths(tree: TokenTree, logits: Tensor, rows: Tensor | None = None) -> list[AcceptedPath]:
    """The longest confirmed path of every tree under argmax.

    Args:
        tree: B trees of N nodes.
        logits: [B, n, V]; one row per node, or per surviving node where `rows` is given.
        rows: LongTensor [B, n], node number behind each row (-1 for rows that are no nodes), where nodes were pruned in
            the pass.
    """
    best = best_tokens(logits).cpu().tolist()  # where trees are on the CPU, the one copy from the device
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    numbers = None if rows is None else rows.tolist()
    paths = []
    for b, size in enumerate(tree.sizes):
        # By node; one that no row stands for is missing, and so never reached.
        row_of = {node: row for row, node in enumerate(range(size) if numbers is None else numbers[b]) if node >= 0}
        choices = {node: best[b][row] for node, row in row_of.items()}
        path = _longest_path(tokens[b][:size], parents[b], choices)
        paths.append(AcceptedPath(path, [choices[node] for node in path], [*path[1:], None]))
    return paths


def best_tokens(logits: Tensor) -> Tensor:
    """The first of the best tokens [...] of logits [..., V]."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy(force=True).argmax(-1))  # a tenth of torch's time
    return logits.argmax(-1)


def _longest_path(tokens: list[int], parents: list[int], choices: Mapping[int, int]) -> list[int]:
    """The nodes from the root to the deepest one that the choices lead to, the first of equals.

    Siblings may share a token (unshared branches), so several paths can be confirmed.
    """
    depth = {0: 0}  # of confirmed nodes; parents come before their children
    for node in range(1, len(tokens)):
        above = parents[node]
        if above in depth and choices[above] == tokens[node] and node in choices:
            depth[node] = depth[above] + 1
    node = max(depth, key=depth.__getitem__)
    path = [node]
    while node:
        node = parents[node]
        path.append(node)
    return path[::-1]
