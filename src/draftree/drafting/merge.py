"""Merge: join the trees of several drafters under one node budget, the most probable paths first.

A trie repeats earlier text; a small model or heads inside the model draft new text. The joined tree is accepted further
than a tree of either with as many nodes. Shaping and pruning treat it like any other tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftree.drafting.base import Attachment, Capabilities, Drafter, RequestState, Step, StepPlan
from draftree.errors import given_as
from draftree.runner.target import Target
from draftree.tree import TokenTree

Part = TypeVar("Part", bound=Drafter)
LEAST, CERTAIN = 1e-6, 0.999  # probabilities of a draft token after its parent


class Merge(Drafter):
    """Joins the trees of tries, prompt lookup and grammars with those of one small model or drafter inside the model.

    Args:
        drafters: the drafters, in any order; at most one of them drafts inside the model. A `Merge` among them
            stands for its own drafters.

    Raises:
        TypeError: something that is no drafter.
        ValueError: no drafter, the same one twice, two inside the model, or one with a lossy rule of its own.

    Attributes:
        drafters: the drafters, without nesting.
        names: their names in statistics; several of one name are numbered. A token that two of them drafted is of
            "lookahead+bita".
    """

    name = "merge"

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        if isinstance(drafters, Drafter) or not isinstance(drafters, Iterable):
            raise TypeError(f"Merge takes a list of drafters, not one {type(drafters).__name__}: put it into a list.")
        self.drafters: tuple[Drafter, ...] = tuple(_flat(drafters))
        if not self.drafters:
            raise ValueError("Merge has no drafter: give two or more, such as [draftree.Lookahead(), medusa].")
        lossy = next((type(drafter).__name__ for drafter in self.drafters if drafter.acceptance is not None), None)
        if lossy is not None:
            raise ValueError(
                f"{lossy} brings a lossy rule for its own draft tokens, not those of others: use it alone, "
                f"or merge {lossy}(lossless=True)."
            )
        inside = [drafter.name for drafter in self.drafters if drafter.capabilities.attaches]
        if len(inside) > 1:
            raise ValueError(
                f"{' and '.join(inside)} both draft inside the model, and a pass takes the rows of one drafter: merge "
                "one of them with a drafter outside the model, such as draftree.Lookahead()."
            )
        if len({id(drafter) for drafter in self.drafters}) < len(self.drafters):
            raise ValueError("Merge has the same drafter object twice, whose state would be mixed up: make two of it.")
        self.names = _numbered([drafter.name for drafter in self.drafters])
        self.name = "+".join(self.names)
        self.max_nodes = sum(drafter.max_nodes for drafter in self.drafters)
        can = [drafter.capabilities for drafter in self.drafters]
        self.capabilities = Capabilities(
            attaches=any(c.attaches for c in can),
            prepares=any(c.prepares for c in can),
            unprepared=any(c.unprepared or not c.prepares for c in can),
            observes=any(c.observes for c in can),
            copies_prediction=any(c.copies_prediction for c in can),
        )

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """See `Drafter.bind`."""
        for i, drafter in enumerate(self.drafters):
            with self._named(i):
                drafter.bind(target, eos_token_ids=eos_token_ids)

    def deep_prefix(self, target: Target) -> list[tuple[Tensor, Tensor]] | None:
        """See `Drafter.deep_prefix`: that of the drafter inside the model."""
        found = (drafter.deep_prefix(target) for drafter in self.drafters)
        return next((prefix for prefix in found if prefix), None)

    def source_name(self, source: int) -> str:
        """See `Drafter.source_name`: the names of all drafters of the token."""
        return "+".join(name for i, name in enumerate(self.names) if source >> i & 1)

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        """See `Drafter.rows`: the nodes once, and what each drafter attaches to them."""
        return nodes + sum(drafter.rows(nodes, requests, attach_to) - nodes for drafter in self.drafters)

    def begin(self, request: RequestState) -> None:
        """See `Drafter.begin`."""
        for i, drafter in enumerate(self.drafters):
            with self._named(i):
                drafter.begin(request)

    def plan(self, step: StepPlan) -> Attachment | None:
        """See `Drafter.plan`: the rows of the drafter inside the model."""
        for i, drafter in enumerate(self.drafters):
            if drafter.capabilities.attaches:
                with self._named(i):
                    return drafter.plan(step)
        return None

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        trees = []
        for i, drafter in enumerate(self.drafters):
            with self._named(i):
                drafted = drafter.draft(requests, [min(n, drafter.max_nodes) for n in budgets])
            trees.append(replace(drafted, source=(drafted.source != 0).long() << i))
        drafting = [i for i, tree in enumerate(trees) if tree.width > 1]
        if len(drafting) < 2:
            return trees[drafting[0] if drafting else 0]
        return join([trees[i] for i in drafting], [self.drafters[i].discount for i in drafting], budgets)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`: each drafter sees the sources of its own draft tokens."""
        for i, drafter in enumerate(self.drafters):
            if drafter.capabilities.observes:
                drafted = (step.trees.source >> i & 1) * drafter.source
                with self._named(i):
                    drafter.observe(replace(step, trees=replace(step.trees, source=drafted)))

    def end(self, request: RequestState) -> None:
        """See `Drafter.end`: all drafters are called, also where one raises."""
        with ExitStack() as ends:
            for i in range(len(self.drafters)):
                ends.callback(self._end, i, request)

    def _end(self, i: int, request: RequestState) -> None:
        with self._named(i):
            self.drafters[i].end(request)

    @contextmanager
    def _named(self, drafter: int) -> Iterator[None]:
        """Add the name of drafter number `drafter` to its errors."""
        try:
            yield
        except Exception as error:
            error.add_note(f"Raised by the drafter {self.names[drafter]!r} in draftree.Merge.")
            raise


def parts_of(drafter: Drafter | None, kind: type[Part]) -> list[Part]:
    """Return the drafters of one class in a drafter or `Merge`; an empty list for None."""
    parts = drafter.drafters if isinstance(drafter, Merge) else [drafter]
    return [part for part in parts if isinstance(part, kind)]


def join(trees: Sequence[TokenTree], discounts: Sequence[float], budgets: Sequence[int]) -> TokenTree:
    """Return the union of the drafters' trees, cut to the best `budgets[b]` draft tokens, best first.

    A path that several drafters drafted is one path with all their source bits. The chance that all of them are wrong
    about its last token is the product of theirs, as if they were independent.

    Args:
        trees: one of each drafter, with the same roots; sources are bits of their own.
    """
    drafts = []
    steps = [_probabilities(tree, discount).tolist() for tree, discount in zip(trees, discounts, strict=True)]
    columns = [torch.stack([tree.tokens, tree.parents, tree.source]).tolist() for tree in trees]
    for b in range(len(budgets)):
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node, -1 the root
        logp: list[float] = []
        wrong: list[float] = []  # the probability that every drafter of a node is wrong
        source: list[int] = []
        for tree, own, (tokens, parents, bits) in zip(trees, steps, columns, strict=True):
            place = [-1]
            for i in range(1, tree.sizes[b]):
                node = nodes.setdefault((place[parents[b][i]], tokens[b][i]), len(nodes))
                place.append(node)
                if node == len(wrong):
                    wrong.append(1.0)
                    source.append(0)
                if not source[node] & bits[b][i]:  # a trie may keep equal branches apart
                    wrong[node] *= 1 - own[b][i]
                    source[node] |= bits[b][i]
        for node, (parent, _) in enumerate(nodes):
            logp.append((logp[parent] if parent >= 0 else 0.0) + math.log1p(-wrong[node]))
        drafts.append(([token for _, token in nodes], [parent for parent, _ in nodes], logp, source))
    return TokenTree.from_drafts(trees[0].tokens[:, 0].tolist(), drafts, budgets)


def _probabilities(tree: TokenTree, discount: float) -> Tensor:
    """Return the probability of each node after its parent, [B, N]."""
    above = tree.logp.gather(1, tree.parents.clamp(min=0))
    return (discount * (tree.logp - above).double().exp()).nan_to_num(0.0).clamp(LEAST, CERTAIN)


def _flat(drafters: Iterable[Any]) -> Iterator[Drafter]:
    for drafter in drafters:
        if isinstance(drafter, Merge):
            yield from drafter.drafters
        elif isinstance(drafter, Drafter):
            yield drafter
        else:
            what = "A part" if isinstance(drafter, type) else repr(drafter)
            raise TypeError(
                f"{what} is no drafter but {given_as(drafter)}: give Merge drafter objects such as "
                "draftree.Lookahead()."
            )


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, the second and later ones of a name with a number."""
    before = [names[:i].count(name) for i, name in enumerate(names)]
    return tuple(name if not n else f"{name}-{n + 1}" for name, n in zip(names, before, strict=True))
