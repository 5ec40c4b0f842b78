"""What several rooms say of wrong input in the same words."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import SupportsFloat, SupportsIndex

LARGEST = 4096  # of what counts draft tokens in some way: more would only take memory and time


class NoTokenError(RuntimeError):
    """A request's options or the model leave no token that could be drawn; `generate` raises a RuntimeError as well."""


class ModelChangedError(ValueError):
    """A model is no longer the one that an engine was made for."""

    def __init__(self) -> None:
        super().__init__(
            "The model has changed since this engine was made, which would answer as it was: make a new Engine."
        )


def install(extra: str) -> str:
    """How the packages of an extra are installed, as long as draftree is used from a clone."""
    return f"pip install -e '.[{extra}]' in the clone of draftree"


def did_you_mean(name: object, known: Iterable[str], least: float = 0.6) -> str:
    """The nearest of the known names as a sentence with a space in front; nothing where none is as like as `least`."""
    near = get_close_matches(str(name), list(known), 1, least)
    return f" Did you mean {near[0]!r}?" if near else ""


def given_as(value: object) -> str:
    """What was given in place of something else: "a list", or the class whose parentheses were forgotten."""
    if isinstance(value, type):
        return f"the class {value.__name__}, and one of its objects is expected ({value.__name__}(...))"
    return f"a {type(value).__name__}"


def check_kind(kind: type, advice: str, **options: object) -> None:
    """Refuse options that are neither None nor of that kind; `advice` says what to pass.

    Raises:
        TypeError: the first such option, by its name.
    """
    for option, value in options.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{option} is {given_as(value)}: pass {advice}.")


def whole(option: str, value: SupportsIndex) -> int:
    """A whole number of any kind, such as NumPy's or a tensor of one, as a plain one.

    Raises:
        ValueError: the option is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{option} is {brief(repr(value))}: give a whole number.") from None


def check_least(least: int, most: float = LARGEST, **options: int | None) -> None:
    """Refuse options that are no whole numbers from `least` to `most`; None is no number.

    Raises:
        ValueError: the first such option, by its name.
    """
    for option, value in options.items():
        number = least if value is None else whole(option, value)
        if not least <= number <= most:
            bound = f"least {least}" if number < least else f"most {most}"
            raise ValueError(f"{option} is {brief(value)}: give at {bound}.")


def check_number(**options: object) -> None:
    """Refuse options that are no numbers, such as digits in a string.

    Raises:
        TypeError: the first such option, by its name.
    """
    for option, value in options.items():
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"{option} is {brief(repr(value))}: give a number.")


def layers_of(option: str, given: object) -> list[int]:
    """The layer numbers that an option lists, in its order.

    Raises:
        TypeError: it is no list, or lists something that is no whole number.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{option} is {brief(repr(given))}: give a list of layer numbers, such as [1, 2].")
    layers = []
    for layer in given:
        try:
            layers.append(operator.index(layer))
        except TypeError:
            raise TypeError(f"{option} lists {brief(repr(layer))}: layers are whole numbers.") from None
    return layers


def brief(text: object) -> str:
    """What another error or a file says, in one line of at most 300 characters, to be quoted within a sentence."""
    line = " ".join(str(text).split())
    return (line if len(line) <= 300 else f"{line[:300]} ..").rstrip(".")
