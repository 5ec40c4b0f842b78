"""One case: methods on one model, with one batch size and one way of choosing tokens.

`bench quick` is such a case, `bench compare` is several of them, and `speed` and `gpu` take the speed of answers from
one; docs/developer/experiments.md describes how they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftree.bench.inputs import Texts
from draftree.bench.kit import Kit
from draftree.bench.log import Log
from draftree.bench.machine import now
from draftree.bench.measure import groups_of, measure, ready
from draftree.bench.names import COMPILED, HOOKED, PLAIN, REFERENCE, label_of
from draftree.bench.samples import Sample, Task
from draftree.bench.summary import Row, count_disturbed, find_differences, summarise
from draftree.progress import Watcher

COLUMNS = (
    "method", "tokens/s", "over plain", "over HF generate", "acceptance length", "overhead efficiency", "differing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Baselines:
    """What methods are held against."""

    reference: str  # the method whose answers all others must equal
    plain: str  # the method that speed-ups of drafting are given over
    uncompared: frozenset[str]  # methods that draw other tokens from the same seed


@dataclass(frozen=True, slots=True)
class Result:
    """A finished case."""

    about: dict[str, Any]  # commit, device, dtype, threads, command, versions, times, settings
    names: tuple[str, ...]  # the methods, in the order of tables
    # rows, unmeasured, notes: by method, its figures, why there are none, and what else to know.
    rows: dict[str, Row]
    unmeasured: dict[str, str]
    notes: dict[str, str]
    baselines: Baselines  # what they are held against
    samples: list[Sample]  # every answer to the `tasks`
    tasks: list[Task]

    def entries(self) -> list[dict[str, Any]]:
        """A row for each measured method, under the names of `COLUMNS` and more, for tables and JSON."""
        return [self._entry(name) for name in self.names if name in self.rows]

    def _entry(self, name: str) -> dict[str, Any]:
        row = self.rows[name]
        entry: dict[str, Any] = {"method": label_of(name), "name": name} | row.figures(self.baselines.plain)
        entry["differing"] = None if name in self.baselines.uncompared else len(row.differing)
        entry["stats"] = None if row.stats is None else row.stats.as_dict()
        entry["differing_prompts"] = [
            {"id": task.prompt.id, "set": task.prompt.set} | where.as_dict() for task, where in row.differing
        ]
        return entry | {"by_set": {one: own.figures(self.baselines.plain) for one, own in row.by_set.items()}}

    def facts(self) -> dict[str, Any]:
        """What else there is to say, as plain values, for JSON."""
        slow, compared = count_disturbed(self.samples)
        return {
            "reference": self.baselines.reference,
            "plain": self.baselines.plain,
            "not_measured": self.unmeasured,
            "notes": self.notes,
            "disturbed": {"slow": slow, "compared": compared},
            "samples": [self._flat(sample) for sample in self.samples],
        }

    def _flat(self, sample: Sample) -> dict[str, Any]:
        """An answer's counts and time, without its tokens."""
        stats = sample.answer.stats
        entry = {
            "method": sample.method,
            "prompt": self.tasks[sample.task].prompt.id,
            "round": sample.round,
            "tokens": len(sample.answer.ids),
            "seconds": sample.answer.seconds,
        }
        if sample.turn:
            entry["turn"] = sample.turn
        if stats is not None:
            entry |= {"steps": stats.steps, "drafted": stats.drafted, "accepted": stats.accepted}
        return entry


def run_case(
    kit: Kit, texts: Texts, names: Sequence[str], watcher: Watcher, *, log: Log | None = None, part: str = ""
) -> Result:
    """Measure methods by the settings of `kit`; figures come from the samples of one process and one run.

    `log` keeps samples, so that a stopped run can go on; `part` says which of several cases this is, for the watcher.

    Raises:
        ValueError: none of the methods can be measured.
    """
    settings, tasks = kit.settings, texts.tasks
    about = kit.subject.about() | {"started": now(), "case": settings.title}
    methods, unmeasured = kit.methods(names)
    watcher.stage(f"{part}first calls" + (", torch.compile" if settings.compiled else ""), None)
    # Prompts as long as their last turns may be, because compiled methods compile by length.
    longest = [
        Task(task.prompt, (task.ids * (most // len(task.ids) + 1))[:most])
        for task, most in zip(tasks, texts.longest, strict=True)
    ]
    usable, refused = ready(methods, longest, settings.batch)
    if not usable:
        reasons = "; ".join(f"{name}: {why}" for name, why in (unmeasured | refused).items())
        raise ValueError(f"No method can be measured ({settings.title}; {reasons}): give one that can.")
    groups = groups_of(tasks, settings.batch)
    watcher.stage(f"{part}measuring", len(usable) * len(groups) * settings.rounds)
    tokenizer = kit.subject.tokenizer
    samples = measure(usable, tasks, settings.rounds, watcher, batch=settings.batch, tokenizer=tokenizer, log=log)
    measured = {method.name for method in usable}
    plain = PLAIN if PLAIN in measured else HOOKED
    # Hugging Face draws a batch from one stream of noise, so that only draftree's own answers can be compared.
    one_stream = settings.sampling is not None and settings.batch > 1
    other_draws = {method.name for method in usable if not method.same_draws}
    other_draws |= {REFERENCE, COMPILED} & measured if one_stream else set()
    compared = [method.name for method in usable if method.name not in other_draws]
    reference = next((name for name in (REFERENCE, PLAIN, HOOKED, *compared) if name in compared), plain)
    rows = summarise(samples, tasks, (REFERENCE, plain), batch=settings.batch)
    comparable = [sample for sample in samples if sample.method not in other_draws]
    find_differences(rows, comparable, tasks, reference, kit.model)
    about |= {"finished": now(), "settings": asdict(settings), "prompts": sum(map(len, groups)), "sets": texts.sets}
    about["warm_prompts"] = len(kit.warm.answers) if kit.warm else 0
    notes = {method.name: method.note for method in usable if method.note}
    notes |= dict.fromkeys(other_draws, "draws other tokens from the same seed, so that answers are not compared")
    baselines = Baselines(reference, plain, frozenset(other_draws))
    return Result(about, tuple(names), rows, unmeasured | refused, notes, baselines, samples, list(tasks))
