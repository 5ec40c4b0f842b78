"""From samples to figures: total tokens over total time, with intervals, and where answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftree.bench.equality import Difference, difference
from draftree.bench.measure import groups_of
from draftree.bench.names import REFERENCE
from draftree.bench.samples import Sample, Task
from draftree.bench.shares import Estimate, Share
from draftree.engine import RequestStats


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
    rows = {}
    for name, m in methods.items():
        speed = Share(tokens[m], seconds[m])
        held = [reference for reference in references if reference in methods]
        over = {one: (speed / Share(tokens[methods[one]], seconds[methods[one]])).estimate for one in held}
        whole = int(tokens[m].sum()), float(seconds[m].sum())
        rows[name] = Row(name, *whole, speed.estimate, over, counts.get(name))
    return rows


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
