"""Cases of which `make test` runs a few and `make test-all` all: the others bear the mark `slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def few(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Every value for `pytest.mark.parametrize`, those of `quick` without the mark; tuples are several parameters."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in quick else pytest.mark.slow
        )
        for value in values
    ]


def shared(values: Sequence[Any], quick: Sequence[Any], tests: int = 2) -> tuple[list[Any], ...]:
    """The same for tests of one kind, as greedy and sampled: each of `quick` is without the mark in one of them."""
    return tuple(few(values, quick[test::tests]) for test in range(tests))


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Several parameters: all combinations; as many without the mark as the longest axis has values.

    These go through all axes at once, so every value of every axis is among them. Of the shorter ones, each waits for
    those before it to have gone through their values, where there is room for that: two axes of two values each meet
    in all four ways if another has four.
    """
    values = [list(axis) for axis in axes]
    longest, strides, stride = max(map(len, values)), [], 1
    for axis in values:
        if stride * len(axis) > longest or len(axis) == longest:
            strides.append(1)
        else:
            strides.append(stride)
            stride *= len(axis)
    quick = {
        tuple(n // stride % len(axis) for axis, stride in zip(values, strides, strict=True)) for n in range(longest)
    }
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, places, strict=True)),
            marks=() if places in quick else pytest.mark.slow,
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]
