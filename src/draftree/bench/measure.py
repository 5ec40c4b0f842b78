"""Measure methods interleaved: each answers a prompt (or batch) before the next prompt begins, in rotating order.

A slow minute of the machine then affects all methods alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.bench.methods import Answer, Method
from draftree.engine.limits import check_prompt
from draftree.models import encode_prompt
from draftree.prompts import Prompt, Watcher
from draftree.runner import inspect_model


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
    """Return prompts with their token ids, by the chat template if there is one.

    Raises:
        ValueError: `model` cannot answer a prompt with `new` tokens; the message names the prompt.
    """
    target = inspect_model(model)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
    for task in tasks:
        try:
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
    """Answer all tasks with all methods, `rounds` times.

    Args:
        methods: in the order of the first group's answers.
        tasks, rounds: the prompts, and how often each is answered.
        watcher: stepped after each method's answers to a group, outside of the measured time.
        batch: neighbouring tasks that are answered together.
    """
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
