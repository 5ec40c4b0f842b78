"""`draftree bench quick`: the speed of Hugging Face's and draftree's decoding on a model, in a few minutes.

All methods answer the same prompts, interleaved, with the same dtype and threads. Lookahead is measured with an empty
trie, with a trie that has seen answers to other prompts of the same sets, and with all draft tokens rejected.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftree.bench.measure import (
    Row,
    Sample,
    count_disturbed,
    encode_tasks,
    find_differences,
    measure,
    ready,
    summarise,
)
from draftree.bench.methods import Draftree, HuggingFace, Method
from draftree.bench.report import Report, Table, describe, now
from draftree.drafting import DraftModel, Lookahead, PromptLookup
from draftree.prompts import Prompt, Watcher, split_prompts
from draftree.runner import inspect_model
from draftree.shaping import DynamicTree

REFERENCE, PLAIN = "HF generate", "draftree, no drafter"
OVER = {"over plain": PLAIN, "over HF generate": REFERENCE}
COLUMNS = ("method", "tokens/s", *OVER, "acceptance length", "differing")
CAPTION = (
    "Total tokens / total time, prefill included [95 % bootstrap over prompts]. Acceptance length: 1 + accepted / "
    "steps. Differing: prompts whose token ids are not those of the reference."
)
MOST_DISTURBED = 0.02  # Share of slow answers above which a report warns.


@dataclass(frozen=True, slots=True)
class Settings:
    """The size of a measurement."""

    per_set: int = 1  # Measured prompts of each set.
    max_new_tokens: int = 96
    rounds: int = 2  # Answers of each prompt.
    warm_per_set: int = 4  # Prompts of each set whose answers fill the trie.


def warmed(model: Any, lessons: Sequence[Sequence[int]], new: int, watcher: Watcher) -> Draftree:
    """Return Lookahead after it has answered `lessons` (token ids of prompts) with up to `new` tokens each.

    Each measured round copies its drafter and its warm shape, so that all begin with the same trie.
    """
    watcher.stage("warming the trie", len(lessons))
    teacher = Draftree("", model, new, Lookahead, DynamicTree)
    for ids in lessons:
        teacher.answer(ids)
        watcher.step()
    return teacher


def run_quick(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    name: str | None = None,
    small: Any = None,
    watcher: Watcher | None = None,
) -> Report:
    """Measure all methods."""
    watcher, new = watcher or Watcher(), settings.max_new_tokens
    if inspect_model(model).encoder_decoder:
        raise ValueError("This benchmark measures decoder-only models: this one has an encoder.")
    measured, warming = split_prompts(prompts, settings.per_set, settings.warm_per_set)
    tasks = encode_tasks(tokenizer, model, [*measured, *warming], new)
    tasks, lessons = tasks[: len(measured)], [task.ids for task in tasks[len(measured) :]]
    about = describe(model, name) | {"started": now(), "settings": asdict(settings)}
    methods = methods_of(model, small, lessons, new, watcher)
    watcher.stage("first calls", None)
    usable, refused = ready(methods, tasks)
    watcher.stage("measuring", len(usable) * len(tasks) * settings.rounds)
    samples = measure(usable, tasks, settings.rounds, watcher)
    rows = summarise(samples, tasks, (PLAIN, REFERENCE))
    find_differences(rows, samples, tasks, REFERENCE, model)
    about |= {"finished": now(), "prompts": len(tasks), "sets": list(dict.fromkeys(t.prompt.set for t in tasks))}
    values = [row.values(OVER) for row in rows.values()]
    table = Table(f"{about['model']}, {about['dtype']}, {about['device']}", values, COLUMNS, CAPTION)
    lines = [f"{method} was not measured: {why}" for method, why in refused.items()]
    return Report("quick", "Whole answers, by method", about, [table], [*lines, *remarks(rows, samples)], {})


def methods_of(model: Any, small: Any, lessons: Sequence[Sequence[int]], new: int, watcher: Watcher) -> list[Method]:
    """Return the methods to measure; without `lessons` there is no warm trie."""
    found: list[Method] = [
        HuggingFace(REFERENCE, model, new),
        HuggingFace("HF prompt lookup", model, new, prompt_lookup_num_tokens=10),
        Draftree(PLAIN, model, new),
        Draftree("PromptLookup", model, new, PromptLookup),
        Draftree("Lookahead, empty trie", model, new, Lookahead),
    ]
    if small is not None:
        found.append(Draftree("DraftModel", model, new, lambda: DraftModel(small)))
        found[-1].optional = True  # Its vocabulary may be another one.
    if lessons:
        warm = warmed(model, lessons, new, watcher)
        copies = (lambda: copy.deepcopy(warm.drafter), lambda: copy.deepcopy(warm.shape))
        found.append(Draftree("Lookahead, warm trie", model, new, *copies))
        found.append(Draftree("Lookahead, all rejected", model, new, *copies, reject_drafts=True))
    return found


def remarks(rows: dict[str, Row], samples: Sequence[Sample]) -> list[str]:
    """Return lines about the differing answers, and a warning if the machine was not quiet."""
    lines = []
    slow, compared = count_disturbed(samples)
    if slow > compared * MOST_DISTURBED:
        lines.append(
            f"The machine was not quiet: {slow} of {compared} answers took over twice the time of the same answer in "
            "another round. Measure again before you trust these figures."
        )
    for name, row in rows.items():
        lines += [f"{name}, prompt {task.prompt.id}: {where}" for task, where in row.differing]
    return lines if any(row.differing for row in rows.values()) else [*lines, "All answers are equal."]
