"""Measure methods interleaved: each answers a prompt (or batch) before the next prompt begins, in rotating order.

A slow minute of the machine then affects all methods alike.

Ratios of totals, and ratios of such ratios, with percentile bootstrap intervals over prompts.

A mean of per-prompt ratios would favour short answers. A ratio resamples both sides by the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from draftree.bench.methods import Answer, Method
from draftree.engine import RequestStats
from draftree.engine.limits import check_prompt, check_source
from draftree.models import encode_prompt
from draftree.prompts import Prompt, Watcher
from draftree.runner import inspect_model

RESAMPLES, LEVEL = 2000, 0.95
FEWEST = 7  # Prompts (or batches) from which on resampling tells something.


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % bootstrap interval; None for fewer than `FEWEST` prompts."""

    value: float
    low: float | None = None
    high: float | None = None

    def columns(self, name: str) -> dict[str, float | None]:
        """Return the columns name, name_low and name_high."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


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
        """Return the 95 % interval; NaN twice for fewer than `FEWEST` prompts."""
        return interval(self._of(*draws(self.units))) if self.units >= FEWEST else (np.nan, np.nan)

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


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its token ids."""

    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of a method, by the numbers of its task and round."""

    method: str
    task: int
    round: int
    answer: Answer


def encode_tasks(tokenizer: Any, model: Any, prompts: Sequence[Prompt], new: int) -> list[Task]:
    """Return prompts with their token ids, by the chat template if there is one."""
    target = inspect_model(model)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
    for task in tasks:
        try:
            if target.encoder_decoder:
                check_source(task.ids, target.vocab_size, target.max_positions)
            else:
                check_prompt(task.ids, new, target.vocab_size, target.max_positions)
        except ValueError as error:
            raise ValueError(f"Prompt {task.prompt.id!r}: {error}") from None
    return tasks


def groups_of(tasks: Sequence[Task], batch: int) -> list[list[int]]:
    """Return the numbers of the tasks that are answered together: neighbours, without an unfilled last batch."""
    return [list(range(i, i + batch)) for i in range(0, len(tasks) - batch + 1, batch)]


def ready(methods: Sequence[Method], tasks: Sequence[Task], batch: int = 1) -> tuple[list[Method], dict[str, str]]:
    """Answer the longest and the shortest prompt (or batch) with each method, uncounted.

    Returns:
        The methods that can answer, and the reasons of the others by name. Only an `optional` method may fail.
    """
    groups = [[tasks[i].ids for i in group] for group in groups_of(tasks, batch)]
    groups.sort(key=lambda prompts: max(map(len, prompts)))
    usable, refused = [], {}
    for method in methods:
        try:
            method.ready([groups[-1], groups[0]])
        except Exception as error:  # A missing or failing compiler raises anything.
            if not method.optional:
                raise
            lines = str(error).strip().splitlines()
            refused[method.name] = lines[0] if lines else type(error).__name__
        else:
            usable.append(method)
    return usable, refused


def measure(
    methods: Sequence[Method], tasks: Sequence[Task], rounds: int, watcher: Watcher, *, batch: int = 1
) -> list[Sample]:
    """Answer all tasks with all methods, `rounds` times."""
    groups = groups_of(tasks, batch)
    samples: list[Sample] = []
    for number in range(rounds):
        for method in methods:
            method.start()
        for i, group in enumerate(groups):
            first = (number * len(groups) + i) % len(methods)
            for method in [*methods[first:], *methods[:first]]:
                answers = method.answers([tasks[task].ids for task in group])
                samples += [Sample(method.name, task, number, a) for task, a in zip(group, answers, strict=True)]
                watcher.step()
    return samples


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
        """Return plain values by column; X_low and X_high are the interval of X."""
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
