"""What to tune for: the options, and the prompts, divided into those to search on, to judge by and to teach tries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.bench.samples import Task, encode_tasks
from draftree.prompts import Prompt, take_per_set
from draftree.runner import inspect_model
from draftree.tuning.file import Spec


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """What to tune for."""

    minutes: float = 5.0  # for all of it
    max_new_tokens: int = 96  # most tokens of an answer
    per_set: int = 40  # most prompts of every set
    specs: tuple[Spec, ...] = ()  # drafters besides tries and prompt lookup

    def __post_init__(self) -> None:
        if not 0 < 60 * self.minutes < math.inf:
            raise ValueError(f"minutes is {self.minutes:g}: give a time over 0, and an end.")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prompts as token ids: to search on, to judge by, to teach tries with; none twice, and some of each."""

    search: list[Task]
    judge: list[Task]
    lessons: list[Task]


def prepare(model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: TuningOptions) -> Prepared:
    """Split and encode the prompts.

    Where rows are marked with `split`, those of `warm` teach; else every second one does. Of the others every second
    one is searched on, and the rest judges.

    Raises:
        ValueError: an encoder-decoder, too few prompts, or one that cannot be answered.
    """
    if inspect_model(model).encoder_decoder:
        raise ValueError("draftree tune is for decoder-only models: this one has an encoder.")
    chosen = take_per_set([p for p in prompts if not p.warm], options.per_set)
    warm = take_per_set([p for p in prompts if p.warm], options.per_set)
    least = 2 if warm else 3
    if len(chosen) < least:
        unmarked = " that are not marked 'warm'" if warm else ""
        raise ValueError(
            f"Tuning takes {least} prompts or more{unmarked}, as none is used twice, instead of {len(chosen)}: give "
            "more rows or a larger --per-set."
        )
    tasks = encode_tasks(tokenizer, model, [*chosen, *warm], options.max_new_tokens)
    tests, lessons = tasks[: len(chosen)], tasks[len(chosen) :]
    if not lessons:
        tests, lessons = _halves(tests)
    return Prepared(*_halves(tests), lessons)


def _halves(tasks: list[Task]) -> tuple[list[Task], list[Task]]:
    """Every second prompt of each set."""
    place: dict[str, int] = {}
    halves: tuple[list[Task], list[Task]] = ([], [])
    for task in tasks:
        number = place[task.prompt.set] = place.get(task.prompt.set, -1) + 1
        halves[number % 2].append(task)
    if not halves[1]:  # one prompt of each set
        return tasks[::2], tasks[1::2]
    return halves
