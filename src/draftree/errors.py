"""Checks and messages for bad input that several rooms share."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import SupportsIndex

RUNNERS = ("auto", "hooked", "eager", "cpu", "cuda_graphs", "in_place")
LARGEST = 4096  # Bound of options that count draft tokens; larger numbers only cost memory and time.


class NoTokenError(RuntimeError):
    """No token can be sampled, because of options or NaN scores; Hugging Face raises a RuntimeError as well."""


class ModelChangedError(ValueError):
    """The model has changed since its engine was made."""

    def __init__(self) -> None:
        super().__init__("The model has changed since this engine was made: make a new Engine.")


def install(extra: str) -> str:
    """Return the command that installs an extra, from a clone of draftree."""
    return f"pip install -e '.[{extra}]' in the clone of draftree"


def did_you_mean(name: object, known: Iterable[str], least: float = 0.6) -> str:
    """Return a hint at the nearest known name, with a leading space; "" if none has at least this similarity."""
    near = get_close_matches(str(name), list(known), 1, least)
    return f" Did you mean {near[0]!r}?" if near else ""


def given_as(value: object) -> str:
    """Return a wrong value's type for a message: "a list", or a hint that a class needs parentheses."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it ({value.__name__}(...))"
    return f"a {type(value).__name__}"


def check_kind(kind: type, advice: str, **options: object) -> None:
    """Refuse options that are neither None nor of this type; `advice` says what to pass."""
    for option, value in options.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{option} is {given_as(value)}: pass {advice}.")


def whole(option: str, value: SupportsIndex) -> int:
    """Return a whole number of any type, such as NumPy's, as an int."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{option} is {brief(repr(value))}: give a whole number.") from None


def check_runner(name: str) -> None:
    """Raise a ValueError unless `name` is one of `RUNNERS`."""
    if name not in RUNNERS:
        raise ValueError(f"runner is {name!r}: choose {', '.join(map(repr, RUNNERS[:-1]))} or {RUNNERS[-1]!r}.")


def check_least(least: int, most: float = LARGEST, **options: int | None) -> None:
    """Refuse options other than None or a whole number from `least` to `most`."""
    for option, value in options.items():
        number = least if value is None else whole(option, value)
        if not least <= number <= most:
            bound = f"least {least}" if number < least else f"most {most}"
            raise ValueError(f"{option} is {brief(value)}: give at {bound}.")


def brief(text: object) -> str:
    """Return a text to quote in a message: one line of at most 300 characters."""
    line = " ".join(str(text).split())
    return (line if len(line) <= 300 else f"{line[:300]} ..").rstrip(".")
