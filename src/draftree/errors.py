"""What several rooms say of wrong input in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The nearest of the known names as a sentence with a space in front; nothing where none is near."""
    near = get_close_matches(str(name), list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_least(least: int, **options: int | None) -> None:
    """Refuse options under `least`; None is no number.

    Raises:
        ValueError: the first such option, by its name.
    """
    for option, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{option} is {value}: give at least {least}.")
