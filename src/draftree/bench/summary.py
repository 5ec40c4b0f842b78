"""Summarise samples: total tokens over total time with intervals, and the answers that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from draftree.bench.measure import Sample, Task, groups_of
from draftree.bench.shares import Estimate, Share
from draftree.engine import RequestStats


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two answers; its gap distinguishes a bug from a near-tie.

    Attributes:
        position: new token that differs; the shorter answer's length if the longer one begins with it.
        expected, found: the token ids there; None after an answer's end.
        gap: best minus second-best logit of the model there, after the tokens before.
    """

    position: int
    expected: int | None
    found: int | None
    gap: float

    def __str__(self) -> str:
        return (
            f"first differs at new token {self.position} (expected id {self.expected}, found {self.found}; "
            f"top-2 logit gap there {self.gap:.3g})"
        )


@torch.no_grad()
def difference(model: Any, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> Difference | None:
    """Return where two answers to `prompt` (all token ids) part; None if they are equal."""
    if list(expected) == list(found):
        return None
    shorter = min(len(expected), len(found))
    position = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    prefix = torch.tensor([[*prompt, *expected[:position]]], device=model.device)
    best = model(prefix).logits[0, -1].float().topk(2).values
    return Difference(
        position,
        expected[position] if position < len(expected) else None,
        found[position] if position < len(found) else None,
        float(best[0] - best[1]),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one method.

    Attributes:
        speed: tokens per second.
        over: this method's speed over a reference's, by the reference's name.
        stats: counts over all answers; None for Hugging Face's methods.
        differing: prompts with another answer than the reference's.
    """

    method: str
    tokens: int
    seconds: float
    speed: Estimate
    over: dict[str, Estimate]
    stats: RequestStats | None
    differing: list[tuple[Task, Difference]] = field(default_factory=list)

    def values(self, columns: dict[str, str]) -> dict[str, Any]:
        """Return plain values by column; X_low and X_high are the interval of X.

        Args:
            columns: reference methods by the column of the speed over theirs.
        """
        found: dict[str, Any] = {"method": self.method, "tokens": self.tokens, "seconds": self.seconds}
        found |= self.speed.columns("tokens/s")
        for column, reference in columns.items():
            if reference in self.over:
                found |= self.over[reference].columns(column)
        if self.stats is not None:
            found |= {name: getattr(self.stats, name) for name in ("steps", "drafted", "accepted")}
            if self.stats.drafted:
                found["acceptance length"] = self.stats.acceptance_length
        differing = [{"id": task.prompt.id} | asdict(where) for task, where in self.differing]
        return found | {"differing": len(differing), "differing_prompts": differing}


def summarise(
    samples: Sequence[Sample], tasks: Sequence[Task], references: Sequence[str], batch: int = 1
) -> dict[str, Row]:
    """Return a row by name of each method in `samples`, with its ratios over the methods `references`."""
    groups = groups_of(tasks, batch)
    methods = {name: m for m, name in enumerate(dict.fromkeys(sample.method for sample in samples))}
    place = {task: column for column, group in enumerate(groups) for task in group}
    tokens, seconds = np.zeros((2, len(methods), len(groups)))
    counts: dict[str, RequestStats] = {}
    for sample in samples:
        at = methods[sample.method], place[sample.task]
        tokens[at] += len(sample.answer.ids)
        seconds[at] += sample.answer.seconds
        if sample.answer.stats is not None:
            counts.setdefault(sample.method, RequestStats()).add(sample.answer.stats)
    speeds = {name: Share(tokens[m], seconds[m]) for name, m in methods.items()}
    rows = {}
    for name, m in methods.items():
        over = {one: (speeds[name] / speeds[one]).estimate for one in references if one in methods}
        whole = int(tokens[m].sum()), float(seconds[m].sum())
        rows[name] = Row(name, *whole, speeds[name].estimate, over, counts.get(name))
    return rows


def find_differences(
    rows: dict[str, Row], samples: Sequence[Sample], tasks: Sequence[Task], reference: str, model: Any
) -> None:
    """Fill `differing` of each row by the answers of `reference`; a prompt counts once, in however many rounds."""
    expected = {s.task: s.answer.ids for s in samples if s.method == reference and s.round == 0}
    done = set()
    for sample in samples:
        key = sample.method, sample.task
        if key in done or sample.answer.ids == expected[sample.task]:
            continue
        task = tasks[sample.task]
        where = difference(model, task.ids, expected[sample.task], sample.answer.ids)
        if where is not None:
            rows[sample.method].differing.append((task, where))
            done.add(key)


def count_disturbed(samples: Sequence[Sample]) -> tuple[int, int]:
    """Return how many answers took over twice the time of the same answer in another round, and how many have one."""
    by_work: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        by_work.setdefault((sample.method, sample.task), []).append(sample.answer.seconds)
    repeated = [seconds for seconds in by_work.values() if len(seconds) > 1]
    return sum(sum(s > 2 * min(own) for s in own) for own in repeated), sum(map(len, repeated))
