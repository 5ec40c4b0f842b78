"""Cases of which `make test` runs a few and `make test-all` all: the others bear the mark `slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def few(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """One parameter for `pytest.mark.parametrize`: every value, those of `quick` without the mark."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]


def halves(values: Sequence[Any], quick: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The same for two tests of one kind, such as greedy and sampled: each of `quick` is without the mark in one."""
    return few(values, quick[::2]), few(values, quick[1::2])


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Several parameters: all combinations; as many without the mark as the longest axis has values.

    These go through all axes at once, each from its start again when it is through, so every value of every axis is
    among them.
    """
    longest = max(map(len, axes))
    quick = {tuple(n % len(axis) for axis in axes) for n in range(longest)}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, places, strict=True)),
            marks=() if places in quick else pytest.mark.slow,
        )
        for places in product(*(range(len(axis)) for axis in axes))
    ]
