"""Figures with their intervals: sums over sums, and ratios of those, resampled by prompts.

Averages of ratios favour short answers and hide how uncertain they are; totals with a bootstrap over prompts do
neither. A ratio resamples both sides by the same prompts, as both answered the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import DegenerateDataWarning, bootstrap

RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True)
class Share:
    """plus + sum(over) / sum(under), counts by prompt; and that divided by another share of the same prompts.

    Attributes:
        over, under: a number for each prompt (or batch of them).
        plus: what is added: 1 for acceptance lengths.
        divisor: another share; None for none.
    """

    over: Sequence[float] | np.ndarray
    under: Sequence[float] | np.ndarray
    plus: float = 0.0
    divisor: Share | None = None

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
        """95 % percentile bootstrap; NaN twice where one prompt leaves nothing to resample."""
        samples = self._samples()
        if len(samples[0]) < 2:
            return np.nan, np.nan
        options: dict[str, Any] = {"paired": True, "vectorized": True, "method": "percentile", "rng": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateDataWarning)  # figures that never vary have no width
            done = bootstrap(samples, self._of, n_resamples=RESAMPLES, **options)
        drawn = done.bootstrap_distribution  # a resample without a single case counts for nothing
        if np.isnan(drawn).all():
            return np.nan, np.nan
        tail = (1 - LEVEL) / 2
        low, high = np.nanquantile(drawn, [tail, 1 - tail])
        return float(low), float(high)

    def columns(self, name: str) -> dict[str, float]:
        """The figure as a table holds it: name, name_low, name_high."""
        low, high = self.interval
        return {name: self.value, f"{name}_low": low, f"{name}_high": high}

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
