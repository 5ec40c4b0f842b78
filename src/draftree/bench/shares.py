"""Ratios of totals, and ratios of such ratios, with percentile bootstrap intervals over prompts.

A mean of per-prompt ratios would favour short answers. A ratio resamples both sides by the same prompts.
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
    """A value with its 95 % bootstrap interval; None for a single prompt, which cannot be resampled."""

    value: float
    low: float | None = None
    high: float | None = None

    def columns(self, name: str) -> dict[str, float | None]:
        """Return the columns name, name_low and name_high."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __format__(self, number: str) -> str:
        """Return a text such as "1.20 [1.10, 1.30]", each number in the format `number`."""
        interval = "" if self.low is None else f" [{self.low:{number}}, {self.high:{number}}]"
        return f"{self.value:{number}}{interval}"


@dataclass(frozen=True)
class Share:
    """The ratio plus + sum(over) / sum(under), or that over another share of the same prompts.

    Attributes:
        over, under: a count for each prompt (or batch).
        plus: 1 for acceptance lengths.
        divisor: another share, or None.
    """

    over: Sequence[float] | NDArray[Any]
    under: Sequence[float] | NDArray[Any]
    plus: float = 0.0
    divisor: Share | None = None

    def __truediv__(self, other: Share) -> Share:
        assert self.divisor is None
        assert other.divisor is None
        return Share(self.over, self.under, self.plus, other)

    @property
    def units(self) -> int:
        """Return the number of prompts (or batches) to resample."""
        return len(self.over)

    @property
    def value(self) -> float:
        """Return the ratio; NaN if the divisor is 0."""
        return float(self._of(np.arange(self.units)))

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval; NaN twice if a single prompt leaves nothing to resample."""
        return interval(self._of(*draws(self.units))) if self.units > 1 else (np.nan, np.nan)

    @property
    def estimate(self) -> Estimate:
        """Return the ratio and its interval."""
        low, high = self.interval
        return Estimate(self.value) if np.isnan(low) else Estimate(self.value, low, high)

    def columns(self, name: str) -> dict[str, float | None]:
        """Return the columns name, name_low and name_high."""
        return self.estimate.columns(name)

    def _of(self, drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the ratios of the prompts `drawn` [.., units]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            over, under = (np.asarray(side, float)[drawn].sum(-1) for side in (self.over, self.under))
            figure = self.plus + _quotient(over, under)
            return figure if self.divisor is None else _quotient(figure, self.divisor._of(drawn))


def _quotient(over: ArrayLike, under: ArrayLike) -> NDArray[np.float64]:
    """Return numbers over numbers; NaN if the divisor is 0."""
    return np.asarray(over, float) / np.where(np.equal(under, 0), np.nan, under)


@lru_cache(maxsize=8)
def draws(*counts: int) -> tuple[NDArray[np.int64], ...]:
    """Return for each count `RESAMPLES` draws of as many numbers below it; the same ones in every run."""
    generator = np.random.default_rng(0)
    return tuple(generator.integers(0, count, (RESAMPLES, count)) for count in counts)


def interval(resampled: NDArray[np.float64]) -> tuple[float, float]:
    """Return the middle 95 % of resampled ratios; NaN among them is ignored."""
    if np.isnan(resampled).all():
        return np.nan, np.nan
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
