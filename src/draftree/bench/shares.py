"""Figures with their intervals: sums over sums, and ratios of those, drawn anew by prompts.

Averages of per-prompt ratios favour short answers and hide how uncertain they are; totals with a percentile bootstrap
over prompts do neither. A ratio draws both sides by the same prompts, as both answered the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % bootstrap interval; None where a single prompt gives nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None

    def columns(self, name: str) -> dict[str, float | None]:
        """The value and its interval as rows of tables hold them: name, name_low, name_high."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __format__(self, number: str) -> str:
        """Such as "1.20 [1.10, 1.30]", each number in the format `number`."""
        interval = "" if self.low is None else f" [{self.low:{number}}, {self.high:{number}}]"
        return f"{self.value:{number}}{interval}"

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval; the value itself twice where there is none."""
        if self.low is None or self.high is None:
            return self.value, self.value
        return self.low, self.high

    def times(self, factor: float) -> Estimate:
        """This one times a positive number."""
        low, high = self.low, self.high
        return Estimate(self.value * factor, *(None if end is None else end * factor for end in (low, high)))

    def inverse(self) -> Estimate:
        """1 over this one."""
        return Estimate(1 / self.value, *(None if end is None else 1 / end for end in (self.high, self.low)))


@dataclass(frozen=True)
class Share:
    """plus + sum(over) / sum(under), counts by prompt; and that divided by another share of the same prompts."""

    # over, under: a number for each prompt (or batch of them).
    over: Sequence[float] | NDArray[Any]
    under: Sequence[float] | NDArray[Any]
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
        return float(self._of(np.arange(self.units)))

    @property
    def interval(self) -> tuple[float, float]:
        """See `interval`; NaN twice where a single prompt leaves nothing to resample."""
        return interval(self._of(*draws(self.units))) if self.units > 1 else (np.nan, np.nan)

    @property
    def estimate(self) -> Estimate:
        """The figure and its interval."""
        low, high = self.interval
        return Estimate(self.value) if np.isnan(low) else Estimate(self.value, low, high)

    def columns(self, name: str) -> dict[str, float | None]:
        """The figure and its interval as rows of tables hold them."""
        return self.estimate.columns(name)

    def _of(self, drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        """The figure of the prompts `drawn` [.., units]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            over, under = (np.asarray(side, float)[drawn].sum(-1) for side in (self.over, self.under))
            figure = self.plus + _quotient(over, under)
            return figure if self.divisor is None else _quotient(figure, self.divisor._of(drawn))


def _quotient(over: ArrayLike, under: ArrayLike) -> NDArray[np.float64]:
    """Numbers over numbers; NaN where there is nothing to divide by."""
    return np.asarray(over, float) / np.where(np.equal(under, 0), np.nan, under)


@lru_cache(maxsize=8)
def draws(*counts: int) -> tuple[NDArray[np.int64], ...]:
    """For each count as many numbers below it, drawn anew `RESAMPLES` times; the same ones in every run."""
    generator = np.random.default_rng(0)
    return tuple(generator.integers(0, count, (RESAMPLES, count)) for count in counts)


def interval(resampled: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of a figure's resamples; one without a single case (NaN) counts for nothing."""
    if np.isnan(resampled).all():
        return np.nan, np.nan
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
