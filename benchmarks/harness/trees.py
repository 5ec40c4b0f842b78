"""Which trees are compared: every kind, at the largest size that a budget lets it have.

A budget counts draft tokens; the root is not one. At the same budget every method verifies as many of them, whatever
rows it attaches to look further ahead. A tree that is the largest of its kind at several budgets is measured once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.drafting.in_model import BEST_FIRST, InModelDrafter
from draftree.errors import did_you_mean
from draftree.shaping.static import Choices, best_choices, chain, efficient, full

SEARCHED, STRAIGHTFORWARD, CHAIN = "choices", "straightforward", "chain"
FULL, EFFICIENT, EFFICIENT_CODE = "full", "efficient", "efficient-code"
KINDS = (STRAIGHTFORWARD, CHAIN, FULL, EFFICIENT, EFFICIENT_CODE, SEARCHED, BEST_FIRST)


@dataclass(frozen=True, slots=True)
class Case:
    """A tree to decode with."""

    kind: str  # one of `KINDS`
    label: str  # the same with its size, such as "full-3, depth 2"
    choices: tuple[tuple[int, ...], ...] | None  # the nodes; None for best-first trees, which differ from step to step
    nodes: int  # draft tokens of a step
    groups: int | None = None  # nodes that look ahead, where the drafter lets one choose and all is not meant


def checked_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds that are named, all of them if none is; a ValueError for an unknown one."""
    for kind in kinds:
        if kind not in KINDS:
            near = did_you_mean(kind, KINDS)
            raise ValueError(f"There is no kind of tree {kind!r}: choose {', '.join(KINDS)}.{near}")
    return tuple(kind for kind in KINDS if kind in kinds) or KINDS


def cases_of(
    drafter: InModelDrafter, kinds: Sequence[str], budgets: Sequence[int], shares: Sequence[Sequence[float]] | None
) -> list[Case]:
    """The trees of `drafter` within the budgets.

    Args:
        drafter: its depth and options decide what is there.
        kinds: of `KINDS`.
        budgets: most draft tokens.
        shares: measured share of right tokens per depth and rank, for the search of choice lists; None leaves them out.
    """
    depth, found = drafter.depth, []
    if STRAIGHTFORWARD in kinds and "groups" in drafter.settings:
        found.append(_static(STRAIGHTFORWARD, STRAIGHTFORWARD, chain(depth), groups=1))
    if CHAIN in kinds:
        found.append(_static(CHAIN, CHAIN, chain(depth)))
    for budget in sorted(set(budgets)):
        if FULL in kinds:
            found += [_static(FULL, f"full-{k}, depth {d}", full(k, d)) for k, d in _full_sizes(depth, budget)]
        for kind, fewer in ((EFFICIENT, False), (EFFICIENT_CODE, True)):
            k = max((k for k in range(1, budget + 1) if len(efficient(k, depth, fewer=fewer)) <= budget), default=0)
            if kind in kinds and k > 1:
                found.append(_static(kind, f"{kind}-{k}", efficient(k, depth, fewer=fewer)))
        if SEARCHED in kinds and shares is not None:
            best = best_choices(shares[:depth], budget)
            found += [_static(SEARCHED, f"{SEARCHED}-{budget}", best)] if best else []  # nothing was right even once
        if BEST_FIRST in kinds:
            found.append(Case(BEST_FIRST, f"{BEST_FIRST}-{budget}", None, budget))
    return [case for case in dict.fromkeys(found) if case.nodes <= max(budgets)]


def _full_sizes(depth: int, budget: int) -> list[tuple[int, int]]:
    """(k, depth) of the full trees within the budget: for each depth the most siblings, where these are 2 or more."""
    sizes = []
    for d in range(2, depth + 1):
        k = max((k for k in range(2, budget + 1) if sum(k**i for i in range(1, d + 1)) <= budget), default=0)
        sizes += [(k, d)] if k else []
    return sizes


def _static(kind: str, label: str, choices: Choices, groups: int | None = None) -> Case:
    return Case(kind, label, tuple(choices), len(choices), groups)


def with_tree(drafter: InModelDrafter, case: Case) -> InModelDrafter:
    """A drafter with the same weights, and the case's tree."""
    options = drafter.settings | {"tree": BEST_FIRST if case.choices is None else case.choices}
    if "groups" in options:
        options["groups"] = case.groups
    return _made_over(drafter, options)


def with_depth(drafter: InModelDrafter, depth: int) -> InModelDrafter:
    """A drafter with the same weights that drafts `depth` tokens ahead, with best-first trees."""
    return _made_over(drafter, drafter.settings | {"tree": BEST_FIRST, "depth": depth})


def anew(drafter: InModelDrafter) -> InModelDrafter:
    """A drafter with the same weights and options that has drafted nothing yet."""
    return _made_over(drafter, drafter.settings)


def _made_over(drafter: InModelDrafter, options: dict[str, Any]) -> InModelDrafter:
    made = type(drafter)(drafter.shapes(), **options)
    made.weights = drafter.weights  # nothing is trained here, so they can be shared
    made.base, made.recipe = drafter.base, drafter.recipe
    return made
