"""Merge: several drafters at once, their trees joined under one node budget by calibrated probability.

A trie knows the text so far, and nothing of new text; heads and masks inside the model draft new text, two or three
tokens far. Where each is strong the other is weak, so more of one tree of both is accepted than of a tree of either
with as many nodes. Shaping and pruning work on merged trees as on any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from draftree.drafting.base import Attachment, ByRequest, Capabilities, Drafter, RequestState, Step, StepPlan
from draftree.drafting.merge.attachments import Joint, join
from draftree.drafting.merge.votes import Votes
from draftree.errors import given_as
from draftree.runner.target import Target
from draftree.tree import TokenTree

Part = TypeVar("Part", bound=Drafter)
LEAST_BUDGET = 16  # draft tokens that each drafter may draft at least, so that it shows where two of them agree


class Merge(Drafter):
    """Joins the trees of several drafters under one node budget.

    Args:
        drafters: the drafters, in any order; each is called as if it were alone, and may be used elsewhere
            afterwards. A `Merge` among them stands for its own drafters.

    Raises:
        TypeError: something that is no drafter.
        ValueError: no drafter, the same one twice, or one with a lossy rule of its own.

    Attributes:
        drafters: the drafters, one level deep.
        names: what statistics call them; several of one name are numbered. A token drafted by two is
            "lookahead+bita".
        votes: what is known of the worth of their draft tokens.
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
            observes=True,
            certain=all(c.certain for c in can),
            copies_prediction=any(c.copies_prediction for c in can),
        )
        self._certain = [i for i, c in enumerate(can) if c.certain]
        self.votes = Votes(len(self.drafters))
        self._begun: ByRequest[list[int]] = ByRequest()  # the drafters that have begun it
        self._joints: ByRequest[Joint] = ByRequest()  # of the pass under way, by its first request

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """See `Drafter.bind`.

        Raises:
            ValueError: a drafter that does not fit the model, or two with keys and values of their own.
        """
        for i in range(len(self.drafters)):
            with self._named(i):
                self.drafters[i].bind(target, eos_token_ids=eos_token_ids)
        self.deep_prefix(target)

    def deep_prefix(self, target: Target) -> list[tuple[Tensor, Tensor]] | None:
        """See `Drafter.deep_prefix`.

        Raises:
            ValueError: two drafters bring one.
        """
        found = {n: prefix for n, d in zip(self.names, self.drafters, strict=True) if (prefix := d.deep_prefix(target))}
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(list(found)[:2])} both bring keys and values of their own, and a pass has room "
                "for one: merge only one of them."
            )
        return next(iter(found.values()), None)

    def source_name(self, source: int) -> str:
        """See `Drafter.source_name`: all drafters that drafted the token."""
        return "+".join(name for i, name in enumerate(self.names) if source >> i & 1)

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        """See `Drafter.rows`: the nodes once, and what each drafter attaches to them."""
        return nodes + sum(drafter.rows(nodes, requests, attach_to) - nodes for drafter in self.drafters)

    def begin(self, request: RequestState) -> None:
        begun = self._begun[request.id] = []
        for i, drafter in enumerate(self.drafters):
            begun.append(i)  # one that raises may have kept something
            with self._named(i):
                drafter.begin(request)

    def plan(self, step: StepPlan) -> Attachment | None:
        """See `Drafter.plan`: the rows of all drafters, and all that any of them reads."""
        trees = step.trees
        if trees is None:
            return None
        parts: list[Attachment | None] = []
        for i, drafter in enumerate(self.drafters):
            with self._named(i):
                parts.append(drafter.plan(step) if drafter.capabilities.attaches else None)
        joint = join(list(zip(self.names, parts, strict=True)), trees)
        self._joints[step.requests[0].id] = joint
        return joint.attachment

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        wider = [max(n, LEAST_BUDGET) if n else 0 for n in budgets]
        trees = {i: self._draft(i, requests, wider) for i in self._certain}
        others = [i for i in range(len(self.drafters)) if i not in self._certain]
        if len(others) == 1 and all(tree.width == 1 for tree in trees.values()):
            alone = self._draft(others[0], requests, budgets)
            return replace(alone, source=(alone.source != 0).long() << others[0])
        trees |= {i: self._draft(i, requests, wider) for i in others}
        return self.votes.join(requests, [trees[i] for i in range(len(self.drafters))], budgets)

    def _draft(self, i: int, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        drafter = self.drafters[i]
        with self._named(i):
            return drafter.draft(requests, [min(n, drafter.max_nodes) for n in budgets])

    def observe(self, step: Step) -> None:
        self.votes.compare(step.requests)
        joint = self._joints.pop(step.requests[0].id, None)
        for i, drafter in enumerate(self.drafters):
            if drafter.capabilities.observes:
                own = step if joint is None else joint.view(step, i)
                drafted = (step.trees.source >> i & 1) * drafter.source
                with self._named(i):
                    drafter.observe(replace(own, trees=replace(step.trees, source=drafted)))

    def end(self, request: RequestState) -> None:
        """See `Drafter.end`; one drafter's error keeps no other from forgetting the request."""
        self.votes.forget(request)
        self._joints.pop(request.id, None)
        begun, errors = self._begun.get(request.id, []), []
        while begun:
            try:
                with self._named(begun[-1]):
                    self.drafters[begun[-1]].end(request)
            except Exception as error:
                errors.append(error)
            begun.pop()  # one that was interrupted stays, and is ended when this is called again
        self._begun.pop(request.id, None)
        if errors:
            raise errors[0]

    @contextmanager
    def _named(self, drafter: int) -> Iterator[None]:
        """Adds the name of drafter number `drafter` to whatever it raises."""
        try:
            yield
        except Exception as error:
            error.add_note(f"Raised by the drafter {self.names[drafter]!r} in draftree.Merge.")
            raise


def parts_of(drafter: Drafter | None, kind: type[Part]) -> list[Part]:
    """The drafters of one kind among those that a drafter is made of; none of None."""
    parts = drafter.drafters if isinstance(drafter, Merge) else [drafter]
    return [part for part in parts if isinstance(part, kind)]


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
    """The names, several of one with a number behind."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return tuple(found)
