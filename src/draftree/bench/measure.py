"""Interleaved measurement: every method answers a prompt before the next prompt begins.

A slow minute of the machine then affects all methods alike. The order of the methods rotates from prompt to prompt. A
prompt may be a batch of prompts that are answered together.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftree.bench.methods import Method
from draftree.bench.samples import Sample, Task
from draftree.progress import Watcher


def groups_of(tasks: Sequence[Task], batch: int) -> list[list[int]]:
    """Return the numbers of the tasks that are answered together: neighbours, without an unfilled last batch."""
    return [list(range(i, i + batch)) for i in range(0, len(tasks) - batch + 1, batch)]


def ready(methods: Sequence[Method], tasks: Sequence[Task], batch: int = 1) -> tuple[list[Method], dict[str, str]]:
    """Let every method answer the longest and the shortest prompt (or batch), uncounted.

    Returns the methods that can answer, and the reason by name of each other one. Only an `optional` method may fail.
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
        tasks, rounds: what to answer, and how often.
        watcher: is stepped after each method's answers to a group, outside of the measured time.
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
