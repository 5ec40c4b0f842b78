"""How a scored tree becomes new tokens: a rule chooses after each node, as far as draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from draftree.acceptance.sampled import PrefixChooser
from draftree.tree import TokenTree

Choice = tuple[int, int, int | None]
"""A node, the token chosen after it, and the child that drafted that token, if any."""


@dataclass(slots=True)
class AcceptedPath:
    """The accepted path of one request's tree, and the token after it.

    Attributes:
        nodes: node numbers whose following token has been chosen, root first.
        tokens: the chosen tokens; tokens[i] follows nodes[i].
        drafted_by: the node that drafted tokens[i]; None for a token of the model's own.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drafted_by: list[int | None] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """How many of the tokens are accepted draft tokens."""
        return sum(node is not None for node in self.drafted_by)

    def choices(self) -> Iterator[Choice]:
        """The same, choice by choice, as `lazy_walk` yields them."""
        yield from zip(self.nodes, self.tokens, self.drafted_by, strict=True)


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """One tree of a batch, and what the model says after its nodes.

    Attributes:
        tree: the batch of trees.
        b: which tree.
        logits: [N, V], one row per surviving node.
        rows: node number -> row of `logits` where nodes were pruned inside the pass; None where all survived.
    """

    tree: TokenTree
    b: int
    logits: Tensor
    rows: dict[int, int] | None = None

    def after(self, node: int) -> Tensor:
        """Logits [V] of what follows a node."""
        return self.logits[node if self.rows is None else self.rows[node]]

    def tokens(self) -> list[int]:
        """The tokens of all nodes, and of padding."""
        tokens: list[int] = self.tree.tokens[self.b].tolist()
        return tokens

    def children(self) -> dict[int, list[int]]:
        """The surviving children of each node that has some."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.tree.parents[self.b, : self.tree.sizes[self.b]].tolist()):
            if node and (self.rows is None or node in self.rows):
                found.setdefault(parent, []).append(node)
        return found


def lazy_walk(scored: ScoredTree, chooser: PrefixChooser) -> Iterator[Choice]:
    """Walk a tree from its root, choosing at the current node only (all nodes would cost many times more).

    Args:
        scored: the tree.
        chooser: the request's rule; its prefix must be the request's tokens.

    Yields:
        (node, token, drafted_by): the token chosen after that node and the child that drafted it, if any. Stop
        iterating to stop the walk.
    """
    tokens, children = scored.tokens(), scored.children()
    frontier = [0]
    while frontier:
        node = frontier[0]
        token = chooser.choose(scored.after(node))
        # Several nodes may spell the same prefix (unshared branches); all of them stay in play.
        frontier = [child for at in frontier for child in children.get(at, ()) if tokens[child] == token]
        yield node, token, frontier[0] if frontier else None
        chooser.push(token)
