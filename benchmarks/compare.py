"""`draftree bench compare`: methods x models x batch sizes x sampling, all on the same prompts.

One model is in memory at a time. Inside a case every prompt is answered by every method before the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.harness.inputs import Settings, Subject, encode_all
from benchmarks.harness.kit import ASSISTED, COLUMNS, LIMITED, REFUSED, SMALL, WARM, Case, Kit, make_kit, run_case
from draftree.bench.report import Report, Table
from draftree.checkpoints import Placement
from draftree.models import load_model
from draftree.prompts import Prompt, Watcher
from draftree.registry import names_in

SAYS = "Whole answers, by model, batch size, sampling and method"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare."""

    settings: Settings  # of all cases; batch and temperature are set here
    methods: tuple[str, ...]  # names, see `kit`
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]  # 0 decodes greedily
    params: str | None = None  # inflate every model to about so many parameters
    assistant: str | None = None  # folder or hub name of a small model; None takes the embedded model's own
    placement: Placement = field(default_factory=Placement)  # device and type of all models

    @property
    def parts(self) -> set[str]:
        """Return the drafters of all methods, merged ones one by one."""
        return {part for name in self.methods for part in names_in(name)}

    def cases(self) -> list[Settings]:
        """Return the settings of every case, in the order of the temperatures."""
        return [replace(self.settings, batch=b, temperature=t) for t in self.temperatures for b in self.batches]


def run_compare(models: Sequence[str | None], prompts: Sequence[Prompt], plan: Plan, watcher: Watcher) -> list[Case]:
    """Return the measured cases.

    Args:
        models: folders or hub names; None for the embedded one.
        prompts: to measure and to warm tries with.
        plan: what to compare.
        watcher: shows progress.

    Raises:
        ValueError: a model, prompt or drafter that cannot be used, or a small model that no method uses, before any
            work; a case in which no method can be measured.
    """
    if plan.assistant is not None and plan.parts.isdisjoint((ASSISTED, SMALL)):
        raise ValueError(
            f"No --method uses the small model of --assistant: add {SMALL} or {ASSISTED}, or leave it out."
        )
    assistant = None if plan.assistant is None else load_model(plan.assistant, plan.placement)[0]
    for name in models:
        subject = Subject.load(name, plan.placement)
        for settings in plan.cases():
            encode_all(subject, prompts, settings)
        Kit(subject, replace(plan.settings, compiled=False), assistant=assistant).methods(plan.methods)
    cases: list[Case] = []
    for name in models:
        subject = Subject.load(name, plan.placement) if len(models) > 1 else subject
        texts = encode_all(subject, prompts, plan.settings)
        lessons = [] if plan.parts.isdisjoint((WARM, REFUSED, LIMITED)) else texts.lessons
        kit = make_kit(subject.inflated(plan.params), lessons, plan.settings, watcher, assistant)
        for i, settings in enumerate(plan.cases(), 1):
            part = f"{i} of {len(plan.cases())} ({settings.title}): "
            cases.append(run_case(replace(kit, settings=settings), texts, plan.methods, watcher, part))
    return cases


def report_of(cases: Sequence[Case]) -> Report:
    """Return all cases in one table, whose rows name model and case, for the result file."""
    rows, lines = [], []
    for case in cases:
        named = {name: case.about[name] for name in ("model", "case")}
        rows += [named | row for row in case.entries()]
        lines += [f"{named['model']}, {named['case']}: {line}" for line in case.remarks()]
    about = cases[-1].about | {"started": cases[0].about["started"]}
    more = {"cases": [case.about for case in cases]}
    return Report("compare", SAYS, about, [Table(SAYS, rows, ("model", "case", *COLUMNS))], lines, more)
