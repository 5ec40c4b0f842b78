"""From samples to figures: total tokens over total time, with intervals, and where answers differ.

Averages of per-prompt ratios favour short answers and hide how uncertain they are; totals with a bootstrap over
prompts do neither. Ratios resample both methods by the same prompts, since both answered the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.bench.equality import Difference, difference
from draftree.bench.measure import groups_of
from draftree.bench.names import REFERENCE
from draftree.bench.samples import Sample, Task
from draftree.engine import RequestStats

RESAMPLES = 2000
LEVEL = 0.95


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


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one method."""

    method: str
    # tokens, seconds: of all its answers.
    tokens: int
    seconds: float
    speed: Estimate  # tokens a second
    over: dict[str, Estimate]  # by name of a reference method, this one's speed over that one's
    stats: RequestStats | None  # its counts over all answers; None for Hugging Face's methods
    # (task, difference) of each prompt whose answer in any round is not the reference's.
    differing: list[tuple[Task, Difference]] = field(default_factory=list)
    by_set: dict[str, Row] = field(default_factory=dict)  # by set, the row of that set's prompts alone

    def efficiency(self, plain: str) -> float | None:
        """Overhead efficiency, (speed-up over `plain`) / (acceptance length); None for Hugging Face's methods."""
        if self.stats is None or plain not in self.over:
            return None
        return self.over[plain].value / self.stats.acceptance_length

    def figures(self, plain: str) -> dict[str, Any]:
        """Plain numbers by the names of columns; X_low and X_high are the interval of X."""
        found: dict[str, Any] = {"tokens": self.tokens, "seconds": self.seconds} | self.speed.columns("tokens/s")
        for column, reference in {"over plain": plain, "over HF generate": REFERENCE}.items():
            if reference in self.over:
                found |= self.over[reference].columns(column)
        if self.stats is not None:
            found |= {name: getattr(self.stats, name) for name in ("steps", "drafted", "accepted")}
            if self.stats.drafted:
                found["acceptance length"] = self.stats.acceptance_length
                found["overhead efficiency"] = self.efficiency(plain)
        return found


def summarise(
    samples: Sequence[Sample], tasks: Sequence[Task], references: Sequence[str], batch: int = 1
) -> dict[str, Row]:
    """A row for every method in `samples`, by name, with its ratios over the methods `references`.

    Inside it is a row for every set. The prompts of a batch are drawn together, and as their sets are mixed there are
    no rows by set then.
    """
    rows = _rows(samples, groups_of(tasks, batch), references)
    for name in dict.fromkeys(task.prompt.set for task in tasks) if batch == 1 else ():
        chosen = [[i] for i, task in enumerate(tasks) if task.prompt.set == name]
        for method, row in _rows(samples, chosen, references).items():
            rows[method].by_set[name] = row
    return rows


def _rows(samples: Sequence[Sample], chosen: Sequence[Sequence[int]], references: Sequence[str]) -> dict[str, Row]:
    methods = {name: m for m, name in enumerate(dict.fromkeys(sample.method for sample in samples))}
    place = {task: column for column, group in enumerate(chosen) for task in group}
    tokens, seconds = np.zeros((2, len(methods), len(chosen)))
    counts: dict[str, RequestStats] = {}
    for sample in samples:
        if sample.task not in place:
            continue
        at = methods[sample.method], place[sample.task]
        tokens[at] += len(sample.answer.ids)
        seconds[at] += sample.answer.seconds
        if sample.answer.stats is not None:
            counts.setdefault(sample.method, RequestStats()).add(sample.answer.stats)
    drawn = np.random.default_rng(0).integers(0, len(chosen), (RESAMPLES, len(chosen)))
    speed = tokens.sum(1) / seconds.sum(1)
    resampled = tokens[:, drawn].sum(2) / seconds[:, drawn].sum(2)
    rows = {}
    for name, m in methods.items():
        over = {
            reference: _estimate(speed[m] / speed[r], resampled[m] / resampled[r], len(chosen))
            for reference in references
            if (r := methods.get(reference)) is not None
        }
        own = _estimate(speed[m], resampled[m], len(chosen))
        rows[name] = Row(name, int(tokens[m].sum()), float(seconds[m].sum()), own, over, counts.get(name))
    return rows


def _estimate(value: float, resampled: NDArray[Any], prompts: int) -> Estimate:
    if prompts < 2:
        return Estimate(float(value))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(float(value), float(low), float(high))


def find_differences(
    rows: dict[str, Row], samples: Sequence[Sample], tasks: Sequence[Task], reference: str, model: Any
) -> None:
    """Fill `differing` of every row: each prompt once, however many rounds differ; turns behind it are not compared."""
    expected = {(s.task, s.turn): s.answer.ids for s in samples if s.method == reference and s.round == 0}
    done = set()
    for sample in sorted(samples, key=lambda s: s.turn):
        key = sample.method, sample.task
        if key in done or sample.answer.ids == expected[sample.task, sample.turn]:
            continue
        task = tasks[sample.task]
        prompt = task.ids if sample.ids is None else sample.ids
        where = difference(model, prompt, expected[sample.task, sample.turn], sample.answer.ids)
        if where is not None:
            rows[sample.method].differing.append((task, where))
            done.add(key)


def count_disturbed(samples: Sequence[Sample]) -> tuple[int, int]:
    """(answers over twice as slow as the same method's fastest on the same prompt, answers compared).

    The same work at half the speed is the machine's doing, so this shows whether it was quiet; (0, 0) for one round.
    """
    by_work: dict[tuple[str, int, int], list[float]] = {}
    for sample in samples:
        by_work.setdefault((sample.method, sample.task, sample.turn), []).append(sample.answer.seconds)
    repeated = [seconds for seconds in by_work.values() if len(seconds) > 1]
    slow = sum(sum(s > 2 * min(seconds) for s in seconds) for seconds in repeated)
    return slow, sum(len(seconds) for seconds in repeated)
