"""The names of drafters, the same on the command line, in benchmarks and in experiments, and what they stand for.

Loads nothing, so that the command line's help can list them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Drafters that need no training, with their classes in `draftree.drafting`, and the embedded model's trained ones.
UNTRAINED = {"lookahead": "Lookahead", "prompt-lookup": "PromptLookup", "grammar": "GrammarDrafter"}
TRAINED = ("medusa", "bita", "hidden-transfer", "draft-model")


def names_in(name: str) -> list[str]:
    """The drafters that a name joins by +; the name of a folder may hold one."""
    return [name] if Path(name).is_dir() else name.split("+")


def make_parts(name: str, own: Mapping[str, Callable[[], Any]], trained: Callable[[str], Any]) -> Any:
    """The drafter called `name`, merged where it joins several by +.

    Args:
        name: of `UNTRAINED`, or what the caller knows.
        own: makes drafters that the caller has by name, in the place of those of `UNTRAINED` as well.
        trained: makes what neither has, such as a trained drafter or one of a folder.
    """
    from draftree import drafting

    made = []
    for part in names_in(name):
        if part in own:
            made.append(own[part]())
        else:
            made.append(getattr(drafting, UNTRAINED[part])() if part in UNTRAINED else trained(part))
    return made[0] if len(made) == 1 else drafting.Merge(made)
