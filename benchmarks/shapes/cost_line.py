"""ProPD's own model of a step's time: a line through the times of the sizes met so far, recent ones weighing more.

Each size keeps a moving average of its steps' times, and a weighted least-squares line goes through those (section
4.2.1). On a GPU below its compute bound steps do lie on a line. On a CPU they do not, which is why the measured curve
(`StepCost`) is the default; this one is here to be compared with it, and to be used where nothing can be measured
beforehand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from draftree.runner.step_cost import StepCost

MOST_FACTOR = 2.0  # a step counts as no more than this much slower or faster than its size's average
ALPHA = 0.2  # weight of a new time in its size's average
FADING = 0.02  # lambda: how fast a size's weight falls, per step in which other sizes were seen
FLAT = 1e-6  # spread of the weighted sizes, relative to their square, under which they give no slope
LEAST = 0.01  # of the average time, that the line is held above where it reaches beyond the sizes seen


class CostLine(StepCost):
    """T_est(i) = b0 + b1 i, where a `StepCost` holds a curve (ProPD, section 4.2.1).

    Args:
        seed: a curve whose points are taken for a first observation each; None starts from nothing, with a step of one
            second whatever its rows, until one has been seen.
        alpha: weight of a new time t_i in T_perf^i <- (1 - alpha) T_perf^i + alpha t_i.
        fading: lambda of the weights W_i = exp(-lambda o_i), o_i the steps since size i was seen last.

    Attributes:
        line: b0 and b1, in seconds and seconds per row.

    Raises:
        ValueError: `alpha` outside 0 .. 1, or negative `fading`.
    """

    def __init__(self, seed: StepCost | None = None, *, alpha: float = ALPHA, fading: float = FADING) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha is {alpha}: give the weight of a new time, over 0 and at most 1.")
        if not fading >= 0:
            raise ValueError(f"fading is {fading}: give 0 (all sizes weigh alike) or more.")
        self.alpha, self.fading = alpha, fading
        self._times: dict[int, float] = {}  # T_perf by size
        self._last: dict[int, int] = {}  # the step at which it was seen last
        self._step = 0
        self.line = (1.0, 0.0)
        self._floor = 0.0
        self._table: np.ndarray | None = None
        if seed is not None:
            self._times = {int(rows): float(t) for rows, t in zip(seed.rows, seed.seconds, strict=True)}
            self._last = dict.fromkeys(self._times, 0)
            self._fit()

    @property
    def rows(self) -> np.ndarray:
        """Return the sizes seen, ascending."""
        return np.array(sorted(self._times), dtype=float)

    @property
    def seconds(self) -> np.ndarray:
        """Return the line at `rows`."""
        return self.of(self.rows)

    def of(self, rows: Any) -> np.ndarray:
        """Return seconds of a step with `rows` rows (array-like)."""
        b0, b1 = self.line
        return np.maximum(b0 + b1 * np.asarray(rows, dtype=float), self._floor)

    def for_batch(self) -> CostLine:
        return CostLine(self, alpha=self.alpha, fading=self.fading)

    def observe(self, rows: int, seconds: float) -> None:
        """A real step had `rows` rows and took `seconds`.

        A stalled step counts as no more than twice its size's average, which starts on the line once there is one.
        """
        self._step += 1
        before = self._times.get(rows)
        if before is None:
            before = float(self.of(rows)) if len(self._times) > 1 else seconds
        seconds = min(max(seconds, before / MOST_FACTOR), MOST_FACTOR * before)
        self._times[rows] = (1 - self.alpha) * before + self.alpha * seconds
        self._last[rows] = self._step
        self._fit()

    def _fit(self) -> None:
        """The weighted least squares in closed form; where all weight is on one size, it moves the line as it is."""
        sizes = np.fromiter(self._times, float, len(self._times))
        times = np.fromiter(self._times.values(), float, len(self._times))
        last = np.fromiter(self._last.values(), float, len(self._last))
        weights = np.exp(-self.fading * (last.max() - last))
        weights /= weights.sum()
        size, time = float(weights @ sizes), float(weights @ times)
        off = sizes - size
        spread = float(weights @ (off * off))
        slope = self.line[1]
        if spread > FLAT * size * size:
            slope = max(float(weights @ (off * (times - time))) / spread, 0.0)  # more rows never cost less
        self.line = (time - slope * size, slope)
        self._floor = LEAST * time
        self._table = None
        if not math.isfinite(sum(self.line)):
            raise ValueError("A step's time must be a finite number of seconds.")
