"""The drafters that an experiment on trained drafters looks at, as `--drafter` names them."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Setup
from benchmarks.harness.trees import with_depth
from draftree.drafting.in_model import InModelDrafter

IN_MODEL = ("bita", "hidden-transfer", "medusa")
OPTIONS = {"per_set": 4, "max_new_tokens": 96, "sets": (), "drafters": IN_MODEL, "depth": 0}


def subjects(setup: Setup, *methods: str) -> dict[str, Any]:
    """Return the drafters by their names in tables; the option `depth`, if it is not 0, limits how far they look.

    Raises:
        ValueError: a depth that one was not trained for, a folder that is missing or does not fit the model, or a
            method that the experiment does not take.
    """
    found = {}
    for name, folder in setup.named.items():
        try:
            trained = setup.trained(folder)
        except ValueError as error:
            raise ValueError(f"Drafter {name!r}: {error}") from None
        if trained.method not in methods:
            raise ValueError(
                f"This experiment takes drafters of {' or '.join(methods)}, and {name!r} holds {trained.method}: leave "
                "it out."
            )
        found[name] = trained
        if (depth := setup.options.get("depth")) and isinstance(trained, InModelDrafter):
            check_depth(name, trained.steps, depth)
            found[name] = with_depth(trained, depth)
    return found


def check_depth(name: str, steps: int, depth: int) -> None:
    """Raise a ValueError for looking further ahead than the `steps` that a drafter is trained for."""
    if depth > steps:
        raise ValueError(
            f"{name!r} looks {steps} tokens ahead and depth is {depth}: give at most {steps}, or a drafter that was "
            "trained for more."
        )
