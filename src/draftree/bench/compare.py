"""`draftree bench compare`: methods x models x batch sizes x sampling, all on the same prompts.

A model's cases come one after the other; inside a case every prompt is answered by every method before the next one
comes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftree.bench.case import Result, run_case
from draftree.bench.checkout import from_checkout
from draftree.bench.inputs import Settings, Subject, encode_all
from draftree.bench.kit import Kit, make_kit
from draftree.bench.log import Log
from draftree.bench.machine import now
from draftree.bench.names import METHODS
from draftree.bench.samples import Sampling
from draftree.models import Placement, load_model
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.training.journal import Journal, fingerprint

JOURNAL = ".bench-compare"  # folder of an unfinished run, among the results


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare.

    Attributes:
        settings: of all cases; batch and sampling are set here.
        methods: names, see `kit`.
        batches, samplings: every one of these with every one of those is a case.
        params: inflate every model to about so many parameters; None for the models themselves.
        assistant: folder or hub name of a small model for all models; None takes the embedded model's own.
        placement: device and type of all models.
    """

    settings: Settings
    methods: tuple[str, ...] = METHODS
    batches: tuple[int, ...] = (1, 4)
    samplings: tuple[Sampling | None, ...] = (None, Sampling(0.8))
    params: str | None = None
    assistant: str | None = None
    placement: Placement = field(default_factory=Placement)

    def cases(self) -> list[Settings]:
        """Settings of every case, greedy ones first."""
        return [replace(self.settings, batch=b, sampling=s) for s in self.samplings for b in self.batches]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A finished comparison.

    Attributes:
        about: commit, device, threads, command, versions and times.
        models: by name, the cases of each.
        resumed: how many groups of answers came from a run that had been stopped.
    """

    about: dict[str, Any]
    models: dict[str, list[Result]]
    resumed: int = 0

    @property
    def cases(self) -> list[Result]:
        """Those of all models."""
        return [result for cases in self.models.values() for result in cases]


def discard_unfinished(out: Path) -> None:
    """Remove what an unfinished run has left in `out`."""
    shutil.rmtree(out / JOURNAL, ignore_errors=True)


def run_compare(
    models: Sequence[str | None], prompts: Sequence[Prompt], plan: Plan, out: Path, watcher: Watcher
) -> Comparison:
    """Measure everything, or go on where a run of the same plan was stopped.

    Args:
        models: folders or hub names; None is the embedded model. One at a time is in memory, as they may be large.
        prompts: to measure on and to warm tries with.
        plan: what to compare.
        out: folder for the results, and for the journal of an unfinished run.
        watcher: shows progress.

    Raises:
        ValueError: a model, prompt or drafter that cannot be used, or an unfinished run of another plan; before any
            work.
    """
    if plan.params is not None:
        from_checkout("inflate")  # says what is missing
    assistant = None if plan.assistant is None else load_model(plan.assistant, plan.placement)[0]
    for name in models:
        subject = Subject.load(name, plan.placement)
        for settings in plan.cases():
            encode_all(subject, prompts, settings)
        Kit(subject, replace(plan.settings, compiled=False), assistant=assistant).methods(plan.methods)
    begun = subject.about() | {"started": now()}
    found = {}
    with Journal(out / JOURNAL, _identity(models, prompts, plan, begun)) as journal:
        log = Log(journal)
        for name in models:
            if len(models) > 1:
                subject = Subject.load(name, plan.placement)
            cases = _measure(subject, prompts, plan, watcher, assistant, log)
            found[cases[0].about["model"]] = cases
    discard_unfinished(out)
    return Comparison(begun | {"finished": now()}, found, log.resumed)


def _identity(
    models: Sequence[str | None], prompts: Sequence[Prompt], plan: Plan, about: dict[str, Any]
) -> dict[str, Any]:
    """What must be equal for a stopped run to go on."""
    facts = {
        "models": list(models),
        "prompts": fingerprint([asdict(prompt) for prompt in prompts]),
        "methods": plan.methods,
        "plan": asdict(plan),
        **{name: about[name] for name in ("commit", "device", "threads", "versions")},
    }
    read_back: dict[str, Any] = json.loads(json.dumps(facts))  # as the journal will hold it
    return read_back


def _measure(
    subject: Subject, prompts: Sequence[Prompt], plan: Plan, watcher: Watcher, assistant: Any, log: Log
) -> list[Result]:
    """All cases of one model."""
    texts = encode_all(subject, prompts, plan.settings)
    kit = make_kit(subject.inflated(plan.params), texts.lessons, plan.settings, watcher, assistant)
    cases = plan.cases()
    return [
        run_case(
            replace(kit, settings=settings),
            texts,
            plan.methods,
            watcher,
            log=log,
            part=f"{i} of {len(cases)} ({settings.title}): ",
        )
        for i, settings in enumerate(cases, 1)
    ]
