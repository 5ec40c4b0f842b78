"""Trees for people, on a terminal: nodes by their text, children in the order of their probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from draftree.tree.token_tree import TokenTree

Decode = Callable[[int], str]


def to_rich(tree: TokenTree, b: int, decode: Decode | None, say: Callable[[int, str], Text]) -> Tree:
    """Tree b for a rich console, likeliest child first.

    decode: token id -> text; ids are shown without it. say: a node and its label -> the line that stands for it.
    """
    from rich.tree import Tree

    labels, below = _labels(tree, b, decode), _children(tree, b)
    branches = {0: Tree(say(0, labels[0]))}
    order = [0]
    for node in order:
        for child in below[node]:
            branches[child] = branches[node].add(say(child, labels[child]))
            order.append(child)
    return branches[0]


def _labels(tree: TokenTree, b: int, decode: Decode | None) -> list[str]:
    tokens = tree.tokens[b, : tree.sizes[b]].tolist()
    if decode is None:
        return [str(token) for token in tokens]
    # Visible spaces and line breaks, which are what tokens differ by most often.
    return [repr(decode(token))[1:-1].replace(" ", "␣") or "∅" for token in tokens]


def _children(tree: TokenTree, b: int) -> list[list[int]]:
    """Children of each node, likeliest first."""
    parents, logp = tree.parents[b, : tree.sizes[b]].tolist(), tree.logp[b].tolist()
    below: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda i: (-logp[i], i)):
        below[parents[node]].append(node)
    return below
