"""Acceptance rules: turn a scored tree into new tokens, by a choice after each accepted node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.acceptance.sampled import PrefixChooser

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


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """One request's tree, and what the model says after its nodes.

    Attributes:
        tokens: of the nodes, the root first.
        parents: number of each node's parent; -1 for the root.
        logits: [N, V], one row per surviving node.
        rows: node number -> row of `logits` where nodes were pruned inside the pass; None where all survived.
    """

    tokens: list[int]
    parents: list[int]
    logits: Tensor
    rows: dict[int, int] | None = None

    def row(self, node: int) -> int:
        """Return the row of `logits` that follows a node."""
        return node if self.rows is None else self.rows[node]

    def after(self, node: int) -> Tensor:
        """Return the logits [V] after a node."""
        return self.logits[self.row(node)]

    def children(self) -> dict[int, list[int]]:
        """Map each inner node to its surviving children."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            if node and (self.rows is None or node in self.rows):
                found.setdefault(parent, []).append(node)
        return found


def best_tokens(logits: Tensor) -> list[Any]:
    """Return the first of the best tokens of logits [.., V], as nested lists [..]."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return logits.numpy(force=True).argmax(-1).tolist()  # a tenth of torch's time
    return logits.argmax(-1).cpu().tolist()


def lazy_walk(scored: ScoredTree, chooser: PrefixChooser | None, best: Sequence[int] = ()) -> Iterator[Choice]:
    """Walk a tree from its root, choosing at the current node only (all nodes would cost many times more).

    Yields:
        (node, token, drafted_by): the token chosen after that node and the child that drafted it, if any. Stop
        iterating to stop the walk.
    """
    children = scored.children()
    frontier = [0]
    while frontier:
        node = frontier[0]
        token = best[scored.row(node)] if chooser is None else chooser.choose(scored.after(node))
        # Several nodes may spell the same prefix (unshared branches); all of them stay in play.
        frontier = [child for at in frontier for child in children.get(at, ()) if scored.tokens[child] == token]
        yield node, token, frontier[0] if frontier else None
        if chooser is not None:
            chooser.push(token)


# Processors of Hugging Face that count on seeing each position once, in order.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


class LossyRule(ABC):
    """The base class of rules that change the output; they are off by default and have `Lossy` in their names."""

    @abstractmethod
    def walk(self, scored: ScoredTree, chooser: PrefixChooser | None) -> Iterator[Choice]:
        """Walk a tree as the rule would.

        Args:
            chooser: the request's processors and choice behind the path; None for the best of the raw scores.

        Yields:
            (node, token, drafted_by) as `lazy_walk` does; the last token is the model's own.
        """

    def check(self, processors: Sequence[object]) -> None:
        """Refuse logits processors that cannot score draft tokens."""
        for processor in processors:
            if type(processor).__name__ in STATEFUL:
                raise ValueError(
                    f"{type(processor).__name__} keeps a state from token to token, and a lossy rule looks at "
                    "several draft tokens of a place: leave its option out, or use the lossless rule."
                )
