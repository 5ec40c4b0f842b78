"""What tests ask of one tree of a batch: the token ids on the way to a node, and the nodes below one."""

from __future__ import annotations

from draftree.tree import TokenTree


def path_of(tree: TokenTree, b: int, node: int) -> list[int]:
    """Token ids from the root of tree b to `node`, both included."""
    return tree.tokens[b, tree.ancestors[b, node]].tolist()


def children_of(tree: TokenTree, b: int, node: int) -> list[int]:
    """Node ids of the children of `node` in tree b, ascending."""
    return [i for i, parent in enumerate(tree.parents[b, : tree.sizes[b]].tolist()) if parent == node >= 0]
