"""Interleaved measurement: every prompt is answered by every method before the next prompt comes.

A slow minute of the machine then hits all methods alike. The order rotates from prompt to prompt, so that no method
always follows the same work at the same place. Samples are kept one by one; figures are made of them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.bench.methods import Answer, Method
from draftree.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its token ids, made once for all methods."""

    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: who gave it, to which task (its number), in which round."""

    method: str
    task: int
    round: int
    answer: Answer


class Watcher:
    """Hears how far a run is; the base class shows nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """A stage begins; `total` is its steps, None where they cannot be counted."""

    def step(self) -> None:
        """One step of the stage is done."""


def ready(methods: Sequence[Method], tasks: Sequence[Task]) -> tuple[list[Method], dict[str, str]]:
    """Let every method answer the longest and the shortest prompt, uncounted.

    Returns
    -------
    usable
        The methods that can answer.
    refused
        By name, why another cannot; only methods that are `optional` may refuse.
    """
    by_length = sorted(tasks, key=lambda task: len(task.ids))
    prompts = [by_length[-1].ids, by_length[0].ids]
    usable, refused = [], {}
    for method in methods:
        try:
            method.ready(prompts)
        except Exception as error:  # a compiler that is missing or fails raises anything
            if not method.optional:
                raise
            lines = str(error).strip().splitlines()
            refused[method.name] = lines[0] if lines else type(error).__name__
        else:
            usable.append(method)
    return usable, refused


def measure(
    methods: Sequence[Method],
    tasks: Sequence[Task],
    rounds: int,
    watcher: Watcher,
) -> list[Sample]:
    """Answer all tasks with all methods, `rounds` times; `watcher` hears of every answer, outside the clock."""
    samples = []
    for number in range(rounds):
        for method in methods:
            method.start()
        for i, task in enumerate(tasks):
            first = (number * len(tasks) + i) % len(methods)
            for method in [*methods[first:], *methods[:first]]:
                samples.append(Sample(method.name, i, number, method.answer(task.ids)))
                watcher.step()
    return samples
