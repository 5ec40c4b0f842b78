"""Greedy acceptance, vectorised over the batch: the deepest node that the model's own choices lead to."""

from __future__ import annotations

import torch
from torch import Tensor

from draftree.acceptance.base import Walk
from draftree.tree import TokenTree


def greedy_walks(
    tree: TokenTree, logits: Tensor, rows: Tensor | None = None, tolerance: float | None = None
) -> list[Walk]:
    """The longest confirmed path of every tree under argmax.

    Args:
        tree: B trees of N nodes.
        logits: [B, n, V]; one row per node, or per surviving node where `rows` is given.
        rows: LongTensor [B, n], node number behind each row (-1 padding), where nodes were pruned in the pass.
        tolerance: stop before the first choice whose two best logits are closer than this (strict mode).
    """
    best = best_tokens(logits).to(tree.device)  # where trees are on the CPU, the one copy from the device
    if tree.width == 1 and tolerance is None:
        return [Walk([0], [token], [None]) for token in best[:, 0].tolist()]
    if tolerance is None and tree.tokens.is_cpu:
        named = [_walk_by_name(tree, b, best[b], None if rows is None else rows[b]) for b in range(tree.batch)]
        found = [walk for walk in named if walk is not None]
        if len(found) == tree.batch:
            return found
    if rows is None:
        best = best[:, : tree.width]
        following = best
    else:
        # Pruned nodes say -1, which equals no token. Rows that are no nodes (padding, a drafter's own) go to a
        # column behind the nodes: a scatter to a place that is also a node's would be a race.
        real = rows >= 0
        place = torch.where(real, rows, tree.width)
        following = torch.full((tree.batch, tree.width + 1), -1, dtype=torch.long, device=best.device)
        following = following.scatter(1, place, best)[:, : tree.width]
        tree = _without_pruned(tree, place)
    last = tree.longest_match(following)
    paths, _ = tree.path_nodes(last)
    tokens = following.gather(1, paths.clamp(min=0))
    packed = torch.stack([paths, tokens]).tolist()  # the one copy from the device
    walks = []
    for b, held in enumerate(packed[0]):
        n = sum(node >= 0 for node in held)  # -1 pads paths
        nodes = held[:n]
        walks.append(Walk(nodes, packed[1][b][:n], [*nodes[1:], None]))
    if tolerance is not None:
        _cut_at_ties(walks, logits, rows, tolerance)
    return walks


def best_tokens(logits: Tensor) -> Tensor:
    """The first of the best tokens [...] of logits [..., V]."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy(force=True).argmax(-1))  # a tenth of torch's time
    return logits.argmax(-1)


def _walk_by_name(tree: TokenTree, b: int, best: Tensor, rows: Tensor | None) -> Walk | None:
    """The walk through tree `b` on the CPU, node by node: a fifth of the masks' time.

    None where siblings on the way share a token, so that there are several.
    """
    size = tree.sizes[b]
    parents, tokens = tree.parents.numpy()[b, :size].tolist(), tree.tokens.numpy()[b, :size].tolist()
    row_choices = best.numpy().tolist()
    # By node; one that no row stands for is missing, and so never reached.
    choices = dict(enumerate(row_choices) if rows is None else zip(rows.tolist(), row_choices, strict=True))
    walk = Walk()
    node: int | None = 0
    while node is not None:
        token = choices[node]
        walk.nodes.append(node)
        walk.tokens.append(token)
        above, at = node, node
        node = None
        for _ in range(tokens.count(token)):  # few nodes, or none, have the token that the model chose
            try:
                at = tokens.index(token, at + 1)
            except ValueError:  # the others come before
                break
            if parents[at] == above:
                if node is not None:
                    return None
                node = at
        if node not in choices:
            node = None
        walk.drafted_by.append(node)
    return walk


def _without_pruned(tree: TokenTree, place: Tensor) -> TokenTree:
    """The same trees, where the nodes that no row stands for hold -2, which is neither a token nor -1."""
    alive = torch.zeros(tree.batch, tree.width + 1, dtype=torch.bool, device=place.device)
    alive = alive.scatter(1, place, True)[:, : tree.width]
    tokens = tree.tokens.masked_fill(~alive, -2)
    return TokenTree(tokens, tree.parents, tree.logp, tree.source, tree.sizes)


def _cut_at_ties(walks: list[Walk], logits: Tensor, rows: Tensor | None, tolerance: float) -> None:
    two = logits.float().topk(2, -1).values
    close = (two[..., 0] - two[..., 1] < tolerance).tolist()
    for b, walk in enumerate(walks):
        where = None if rows is None else {node: i for i, node in enumerate(rows[b].tolist())}
        for i, node in enumerate(walk.nodes):
            if close[b][node if where is None else where[node]]:
                walk.nodes, walk.tokens, walk.drafted_by = walk.nodes[:i], walk.tokens[:i], walk.drafted_by[:i]
                walk.tie = True
                break
