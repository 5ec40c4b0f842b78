"""Interleaved measurement: every prompt is answered by every method before the next prompt comes.

A slow minute of the machine then affects all methods alike. The order rotates from prompt to prompt, so that no method
always follows the same work at the same place. Samples are kept one by one; figures are made of them afterwards.
A prompt may be a batch of them answered together, or a conversation of several turns, in which each method's own
answers stand in the prompts of its later turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.bench.log import Log
from draftree.bench.methods import Method
from draftree.bench.samples import Sample, Task
from draftree.models import encode_prompt
from draftree.progress import Watcher


def groups_of(tasks: Sequence[Task], batch: int) -> list[list[int]]:
    """Numbers of the tasks that are answered together: neighbours; those that do not fill a batch are left out."""
    return [list(range(i, i + batch)) for i in range(0, len(tasks) - batch + 1, batch)]


def ready(methods: Sequence[Method], tasks: Sequence[Task], batch: int = 1) -> tuple[list[Method], dict[str, str]]:
    """Let every method answer the longest and the shortest prompt (or batch of them), uncounted.

    Returns the methods that can answer, and by name why another cannot; only methods that are `optional` may refuse.
    """
    groups = [[tasks[i].ids for i in group] for group in groups_of(tasks, batch)]
    groups.sort(key=lambda prompts: max(map(len, prompts)))
    usable, refused = [], {}
    for method in methods:
        try:
            method.ready([groups[-1], groups[0]])
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
    *,
    batch: int = 1,
    tokenizer: Any = None,
    log: Log | None = None,
) -> list[Sample]:
    """Answer all tasks with all methods, `rounds` times.

    Args:
        methods: in the order of the first group's answers; it rotates from group to group.
        tasks, rounds: what to answer, and how often.
        watcher: is stepped after every method's answers to a group, outside of the measured time.
        batch: neighbouring tasks that are answered together.
        tokenizer: makes the prompts of later turns; None leaves those out.
        log: keeps samples, and gives back those of a run that was stopped.
    """
    groups = groups_of(tasks, batch)
    samples: list[Sample] = []
    for number in range(rounds):
        for method in methods:
            method.start()
        for i, group in enumerate(groups):
            new = None if log is None else log.held()
            if new is None:
                new = []
                first = (number * len(groups) + i) % len(methods)
                for method in [*methods[first:], *methods[:first]]:
                    new += _converse(method, tasks, group, number, tokenizer)
                    watcher.step()
                if log is not None:
                    log.keep(new)
            else:
                for method in methods:
                    for sample in (one for one in new if one.method == method.name):
                        method.recall(sample.ids or tasks[sample.task].ids, sample.answer.ids)
                    watcher.step()
            samples += new
    return samples


def _converse(method: Method, tasks: Sequence[Task], group: Sequence[int], number: int, tokenizer: Any) -> list[Sample]:
    """All turns of a group; prompts whose conversation has fewer turns are left out of the later ones."""
    samples: list[Sample] = []
    given: dict[int, list[list[int]]] = {task: [] for task in group}
    turns = 1 if tokenizer is None else 1 + max(len(tasks[task].prompt.later) for task in group)
    for turn in range(turns):
        present = [task for task in group if turn <= len(tasks[task].prompt.later)]
        prompts = {task: _turn(tokenizer, tasks[task], given[task]) for task in present}
        answers = method.answers(list(prompts.values()))
        for (task, ids), answer in zip(prompts.items(), answers, strict=True):
            given[task].append(answer.ids)
            samples.append(Sample(method.name, task, number, answer, turn, ids if turn else None))
    return samples


def _turn(tokenizer: Any, task: Task, answers: Sequence[Sequence[int]]) -> list[int]:
    """Token ids of a conversation's next turn, after the answers to its earlier ones."""
    if not answers:
        return task.ids
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    turns = [task.prompt.text, *task.prompt.later]
    return encode_prompt(tokenizer, turns[len(said)], history=list(zip(turns, said, strict=False)))
