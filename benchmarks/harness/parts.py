"""Make drafters by the names of result tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from draftree.drafting import Merge
from draftree.registry import REGISTRY, UNTRAINED, names_in


def make_parts(name: str, own: Mapping[str, Callable[[], Any]], trained: Callable[[str], Any]) -> Any:
    """Return the drafter called `name`, merged where it joins several by +.

    Args:
        name: one of `UNTRAINED`, or a name that the caller knows.
        own: makes the caller's drafters by name; they replace those of `UNTRAINED`.
        trained: makes the drafters of other names, such as trained ones and folders.
    """
    made = []
    for part in names_in(name):
        if part in own:
            made.append(own[part]())
        else:
            made.append(REGISTRY[part].load()() if part in UNTRAINED else trained(part))
    return made[0] if len(made) == 1 else Merge(made)
