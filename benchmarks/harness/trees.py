"""Drafters inside the model with other trees, or another depth, on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftree.drafting.in_model import BEST_FIRST, InModelDrafter

SEARCHED, STRAIGHTFORWARD, CHAIN = "choices", "straightforward", "chain"
FULL, EFFICIENT = "full", "efficient"


@dataclass(frozen=True, slots=True)
class Case:
    """A tree to decode with."""

    label: str  # how its nodes were chosen, and its size, such as "full-3, depth 2"
    choices: tuple[tuple[int, ...], ...] | None  # the nodes; None for best-first trees, which differ from step to step
    nodes: int  # draft tokens of a step
    groups: int | None = None  # nodes that look ahead, where the drafter lets one choose and all is not meant


def with_tree(drafter: InModelDrafter, case: Case) -> InModelDrafter:
    """Return a drafter with the same weights, and the case's tree."""
    options = drafter.settings | {"tree": BEST_FIRST if case.choices is None else case.choices}
    if "groups" in options:
        options["groups"] = case.groups
    return _made_over(drafter, options)


def with_depth(drafter: InModelDrafter, depth: int) -> InModelDrafter:
    """Return a drafter with the same weights that drafts `depth` tokens ahead, with best-first trees."""
    return _made_over(drafter, drafter.settings | {"tree": BEST_FIRST, "depth": depth})


def anew(drafter: InModelDrafter) -> InModelDrafter:
    """Return a drafter with the same weights and options that has drafted nothing yet."""
    return _made_over(drafter, drafter.settings)


def _made_over(drafter: InModelDrafter, options: dict[str, Any]) -> InModelDrafter:
    made = type(drafter)(drafter.shapes(), **options)
    made.weights = drafter.weights  # nothing is trained here, so they can be shared
    made.base, made.recipe = drafter.base, drafter.recipe
    return made
