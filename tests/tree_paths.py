"""Helpers for tests of trees: any shape from arrays, scores, paths and children."""

from __future__ import annotations

from torch import Tensor

from draftree.acceptance import ScoredTree
from draftree.tree import TokenTree
from draftree.tree.structure import Numbers, laid_out


def from_arrays(
    tokens: Numbers, parents: Numbers, logp: Numbers | float = 0.0, source: Numbers | int = 1, *, root: int
) -> TokenTree:
    """One tree from flat arrays that leave the root out; in them parent -1 is a child of the root.

    Siblings may share a token, and a child may be likelier than its parent.
    """
    return TokenTree(*laid_out([root], [(tokens, parents, logp, source)]))


def scored_tree(tree: TokenTree, b: int, logits: Tensor, rows: dict[int, int] | None = None) -> ScoredTree:
    """Tree b with logits [N, V] behind its nodes, as rules take it."""
    size = tree.sizes[b]
    return ScoredTree(tree.tokens[b, :size].tolist(), tree.parents[b, :size].tolist(), logits, rows)


def path_of(tree: TokenTree, b: int, node: int) -> list[int]:
    """Token ids from the root of tree b to `node`, both included."""
    return tree.tokens[b, tree.ancestors[b, node]].tolist()


def children_of(tree: TokenTree, b: int, node: int) -> list[int]:
    """Node ids of the children of `node` in tree b, ascending."""
    return [i for i, parent in enumerate(tree.parents[b, : tree.sizes[b]].tolist()) if parent == node >= 0]
