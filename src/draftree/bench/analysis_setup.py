"""What the analyses of trained drafters share: what they are given, what they give back, and intervals over prompts.

An analysis gets a model, prompts and drafters, and returns rows of plain values with the tables and the picture made
of them. Whatever it counts, it counts per prompt, so that every figure has a bootstrap interval over prompts, and a
ratio of two figures resamples both by the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from draftree.bench.harness import Task
from draftree.bench.summary import LEVEL, RESAMPLES, Estimate
from draftree.drafting.folder import Trained
from draftree.host.target import Target, inspect_model
from draftree.progress import Watcher

RANKS = 10  # best guesses looked at


@dataclass(frozen=True, slots=True)
class AccuracySettings:
    """How much to measure.

    Attributes:
        per_set: prompts of every set.
        max_new_tokens: most tokens of an answer.
        budgets: guesses a step, for experiments that decode with trees.
        trees: kinds of trees, for the same.
        search_per_set: other prompts of every set, on which choice lists are searched.
        slots: answers that are looked at together, where no time is taken.
    """

    per_set: int = 4
    max_new_tokens: int = 96
    budgets: tuple[int, ...] = (4, 8, 16, 32)
    trees: tuple[str, ...] = ()
    search_per_set: int = 4
    slots: int = 8

    def __post_init__(self) -> None:
        for name in ("per_set", "max_new_tokens", "search_per_set", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more.")
        if not self.budgets or min(self.budgets) < 1:
            raise ValueError(f"budgets is {list(self.budgets)}: give at least one number of guesses, each 1 or more.")


@dataclass(frozen=True, slots=True)
class Subject:
    """A trained drafter (or early head) under the name that tables give it."""

    name: str
    trained: Trained

    @property
    def method(self) -> str:
        """The method's word, as in folders."""
        return self.trained.method


@dataclass(frozen=True, slots=True)
class Setup:
    """All that an analysis is given.

    Attributes:
        model: a decoder-only model.
        subjects: what is analysed.
        tasks: prompts to measure on.
        lessons: token ids of other prompts, for what must not be chosen on the measured ones.
        settings: how much.
        watcher: hears of progress.
    """

    model: Any
    subjects: Sequence[Subject]
    tasks: Sequence[Task]
    lessons: Sequence[Sequence[int]]
    settings: AccuracySettings
    watcher: Watcher

    @property
    def target(self) -> Target:
        """What the hosts know of the model."""
        return inspect_model(self.model)


@dataclass(slots=True)
class Findings:
    """What an analysis gives back.

    Attributes:
        rows: plain values, for JSON.
        tables: for a console.
        draw: puts the picture into a matplotlib figure.
        size: of the figure, in inches.
        more: further entries of the result file.
        remarks: lines below the tables.
    """

    rows: list[dict[str, Any]]
    tables: list[Table]
    draw: Callable[[Any], None]
    size: tuple[float, float]
    more: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A figure, and what it is in every resample of the prompts [RESAMPLES]; NaN where a resample has no case."""

    value: float
    resampled: np.ndarray
    prompts: int

    @classmethod
    def share(cls, over: np.ndarray, under: np.ndarray, plus: float = 0.0, seed: int = 0) -> Sampled:
        """plus + sum(over) / sum(under), counts per prompt [T]; the same prompts are drawn for the same T and seed."""
        count = len(over)
        drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
        below = under[drawn].sum(1).astype(float)
        below[below == 0] = np.nan
        total = under.sum()
        return cls(plus + (over.sum() / total if total else np.nan), plus + over[drawn].sum(1) / below, count)

    def __truediv__(self, other: Sampled) -> Sampled:
        """The ratio, resampled by the same prompts."""
        return Sampled(self.value / other.value, self.resampled / other.resampled, self.prompts)

    @property
    def estimate(self) -> Estimate:
        """The value with its interval; none where a single prompt leaves nothing to resample."""
        if self.prompts < 2 or np.isnan(self.resampled).all():
            return Estimate(float(self.value), None, None)
        tail = (1 - LEVEL) / 2
        low, high = np.nanquantile(self.resampled, [tail, 1 - tail])
        return Estimate(float(self.value), float(low), float(high))


def bounds(estimate: Estimate) -> tuple[float, float]:
    """Both ends of the interval as pictures show it; the value itself where there is none."""
    if estimate.low is None or estimate.high is None:
        return estimate.value, estimate.value
    return estimate.low, estimate.high


def plain_axis(axis: Any, title: str, x: str, y: str) -> None:
    """Labels and lines of one panel, alike in all pictures."""
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.tick_params(labelsize=8, colors="0.4")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
