"""Figures with their intervals: sums over sums, and ratios of those, resampled by prompts.

Averages of ratios favour short answers and hide how uncertain they are; totals with a bootstrap over prompts do
neither. A ratio resamples both sides by the same prompts, as both answered the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import DegenerateDataWarning, bootstrap

RESAMPLES, LEVEL = 2000, 0.95


def interval(samples: Sequence[Any], figure: Callable[..., Any], **options: Any) -> tuple[float, float]:
    """95 % percentile bootstrap of `figure` of the samples; NaN twice where a single case leaves nothing to resample.

    `options` are those of scipy's `bootstrap`.
    """
    if min(len(one) for one in samples) < 2:
        return np.nan, np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # figures that never vary have no width
        done = bootstrap(samples, figure, n_resamples=RESAMPLES, method="percentile", rng=0, **options)
    drawn = done.bootstrap_distribution  # a resample without a single case counts for nothing
    if np.isnan(drawn).all():
        return np.nan, np.nan
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def columns(name: str, value: float, ends: tuple[float, float]) -> dict[str, float]:
    """A figure as a table holds it: name, name_low, name_high."""
    return {name: value, f"{name}_low": ends[0], f"{name}_high": ends[1]}


@dataclass(frozen=True)
class Redrawn:
    """A figure of rows that are drawn anew for its interval, and perhaps of prompts that are drawn anew beside them."""

    # Of the numbers of the rows that were drawn, one array for each of `counts`; NaN for none.
    figure: Callable[..., float]
    counts: tuple[int, ...]  # how many rows, and how many prompts, there are to draw from

    @property
    def units(self) -> int:
        """How many rows or prompts there are to draw from, whichever are fewer."""
        return min(self.counts)

    def columns(self, name: str) -> dict[str, float]:
        """The figure as a table holds it, see `columns`; NaN without any case."""
        samples = [np.arange(count) for count in self.counts]
        value = self.figure(*samples)
        return columns(
            name, value, (np.nan, np.nan) if np.isnan(value) else interval(samples, self.figure, vectorized=False)
        )


@dataclass(frozen=True)
class Share:
    """plus + sum(over) / sum(under), counts by prompt; and that divided by another share of the same prompts."""

    # over, under: a number for each prompt (or batch of them).
    over: Sequence[float] | np.ndarray
    under: Sequence[float] | np.ndarray
    plus: float = 0.0  # what is added: 1 for acceptance lengths
    divisor: Share | None = None  # another share; None for none

    def __truediv__(self, other: Share) -> Share:
        assert self.divisor is None
        assert other.divisor is None
        return Share(self.over, self.under, self.plus, other)

    @property
    def units(self) -> int:
        """How many prompts (or batches of them) there are to draw from."""
        return len(self.over)

    @property
    def value(self) -> float:
        """The figure; NaN where there is nothing to divide by."""
        return float(self._of(*self._samples()))

    @property
    def interval(self) -> tuple[float, float]:
        """See `interval`."""
        return interval(self._samples(), self._of, paired=True, vectorized=True)

    def columns(self, name: str) -> dict[str, float]:
        """The figure as a table holds it, see `columns`."""
        return columns(name, self.value, self.interval)

    def _samples(self) -> tuple[np.ndarray, ...]:
        own = np.asarray(self.over, float), np.asarray(self.under, float)
        return own if self.divisor is None else (*own, *self.divisor._samples())

    def _of(self, *samples: ArrayLike, axis: int = -1) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            quotients = [
                np.sum(over, axis) / np.where(np.sum(under, axis) == 0, np.nan, np.sum(under, axis))
                for over, under in zip(samples[::2], samples[1::2], strict=True)
            ]
            first = self.plus + quotients[0]
            if self.divisor is None:
                return first
            second = self.divisor.plus + quotients[1]
            return first / np.where(second == 0, np.nan, second)
