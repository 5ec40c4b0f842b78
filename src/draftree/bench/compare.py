"""`draftree bench compare`: methods x models x batch sizes x sampling, all on the same prompts.

A model's cases come one after the other; inside a case every prompt is answered by every method before the next one
comes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftree.bench.case import Result, Settings, encode_all, make_kit, run_case
from draftree.bench.inflate import inflate
from draftree.bench.kit import LABELS, WARM, Kit
from draftree.bench.log import CaseLog
from draftree.bench.machine import describe, now
from draftree.bench.methods import Sampling
from draftree.models import load_model
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.training.journal import Journal, fingerprint

MERGED = f"{WARM}+hidden_transfer"
METHODS = (*LABELS, MERGED)
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
    """

    settings: Settings
    methods: tuple[str, ...] = METHODS
    batches: tuple[int, ...] = (1, 4)
    samplings: tuple[Sampling | None, ...] = (None, Sampling(0.8))
    params: str | None = None
    assistant: str | None = None

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        models = [{"model": name, "cases": [r.as_dict() for r in cases]} for name, cases in self.models.items()]
        return {"about": self.about, "resumed": self.resumed, "models": models}


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
    assistant = None if plan.assistant is None else load_model(plan.assistant)[0]
    for name in models:
        loaded = model, tokenizer = load_model(name)
        for settings in plan.cases():
            encode_all(model, tokenizer, prompts, settings)
        Kit(model, plan.settings.max_new_tokens, assistant=assistant, compiled=False).methods(plan.methods)
    begun = describe(model, models[0]) | {"started": now()}
    folder, found = out / JOURNAL, {}
    with Journal(folder, _identity(models, prompts, plan, begun)) as journal:
        entries = journal.entries()
        for number, name in enumerate(models):
            if len(models) > 1:
                loaded = model, tokenizer = load_model(name)
            logs = [CaseLog(journal, entries, number * len(plan.cases()) + i) for i in range(len(plan.cases()))]
            cases = _measure(loaded, name, prompts, plan, watcher, assistant, logs)
            found[cases[0].about["model"]] = cases
    shutil.rmtree(folder)
    return Comparison(begun | {"finished": now()}, found, len(entries))


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
    loaded: tuple[Any, Any],
    name: str | None,
    prompts: Sequence[Prompt],
    plan: Plan,
    watcher: Watcher,
    assistant: Any,
    logs: Sequence[CaseLog],
) -> list[Result]:
    """All cases of one model, (model, tokenizer)."""
    small, tokenizer = loaded
    texts = encode_all(small, tokenizer, prompts, plan.settings)
    large = None if plan.params is None else inflate(small, plan.params)
    size = plan.params or ""
    kit = make_kit(small, tokenizer, texts, plan.settings, watcher, large=large, size=size, assistant=assistant)
    results = []
    for i, (settings, log) in enumerate(zip(plan.cases(), logs, strict=True)):
        part = f"{i + 1} of {len(logs)} ({settings.title}): "
        case = replace(kit, sampling=settings.sampling)
        given = tokenizer, texts, settings, plan.methods
        results.append(run_case(case, *given, name=name, watcher=watcher, log=log, part=part))
    return results
