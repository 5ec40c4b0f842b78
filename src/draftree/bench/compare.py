"""`draftree bench compare`: methods x models x batch sizes x sampling, all on the same prompts.

A model's cases come one after the other; inside a case every prompt is answered by every method before the next one
comes.
"""

from __future__ import annotations

import hashlib
import json
import re
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
from draftree.bench.names import ASSISTED, SMALL, WITH_WARM_TRIE
from draftree.bench.samples import Sampling
from draftree.drafter_names import names_in
from draftree.models import load_model
from draftree.placement import Placement
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.training.journal import Journal, fingerprint

JOURNAL = ".bench-compare"  # folder of an unfinished run, among the results


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare."""

    settings: Settings  # of all cases; batch and sampling are set here
    methods: tuple[str, ...]  # names, see `kit`
    # batches, samplings: every one of these with every one of those is a case.
    batches: tuple[int, ...]
    samplings: tuple[Sampling | None, ...]
    params: str | None = None  # inflate every model to about so many parameters; None for the models themselves
    # Folder or hub name of a small model for all models; None takes the embedded model's own.
    assistant: str | None = None
    placement: Placement = field(default_factory=Placement)  # device and type of all models

    @property
    def parts(self) -> list[str]:
        """What its methods are made of: merged drafters one by one."""
        return [part for name in self.methods for part in names_in(name)]

    def cases(self) -> list[Settings]:
        """Settings of every case, greedy ones first."""
        return [replace(self.settings, batch=b, sampling=s) for s in self.samplings for b in self.batches]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A finished comparison."""

    about: dict[str, Any]  # commit, device, threads, command, versions and times
    # models, tokenizers: by the model's name, its cases and its tokenizer.
    models: dict[str, list[Result]]
    tokenizers: dict[str, Any]
    resumed: int = 0  # how many groups of answers came from a run that had been stopped

    @property
    def cases(self) -> list[Result]:
        """Those of all models."""
        return [result for cases in self.models.values() for result in cases]


def file_name(text: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.+-]+", "-", Path(text).name).strip("-")


def discard_unfinished(out: Path) -> None:
    """Remove what an unfinished run has left in `out`."""
    shutil.rmtree(out / JOURNAL, ignore_errors=True)


def run_compare(
    models: Sequence[str | None], prompts: Sequence[Prompt], plan: Plan, out: Path, watcher: Watcher
) -> Comparison:
    """Measure everything, or go on where a run of the same plan was stopped, whose journal is in `out`.

    One of the `models` (folders or hub names, None for the embedded one) is in memory at a time.

    Raises:
        ValueError: a model, prompt or drafter that cannot be used, a small model that no method uses, two models or
            methods of one name, or an unfinished run of another plan; before any work. A case in which no method can be
            measured.
    """
    if plan.params is not None:
        from_checkout("inflate")  # says what is missing
    if plan.assistant is not None and set(plan.parts).isdisjoint((ASSISTED, SMALL)):
        raise ValueError(
            f"No --method uses the small model of --assistant: add {SMALL} or {ASSISTED}, or leave it out."
        )
    assistant = None if plan.assistant is None else load_model(plan.assistant, plan.placement)[0]
    _refuse_twins("methods", plan.methods)
    names: list[str] = []
    for name in models:
        subject = Subject.load(name, plan.placement)
        names.append(subject.about()["model"])
        _refuse_twins("models", names)
        for settings in plan.cases():
            encode_all(subject, prompts, settings)
        Kit(subject, replace(plan.settings, compiled=False), assistant=assistant).methods(plan.methods)
    begun = subject.about() | {"started": now()}
    found, tokenizers = {}, {}
    with Journal(out / JOURNAL, _identity(models, prompts, plan, begun)) as journal:
        log = Log(journal)
        try:
            for name in models:
                if len(models) > 1:
                    subject = Subject.load(name, plan.placement)
                cases = _measure(subject, prompts, plan, watcher, assistant, log)
                called = cases[0].about["model"]
                found[called], tokenizers[called] = cases, subject.tokenizer
        finally:
            if not journal.done:  # an empty one would be in the way of another plan
                discard_unfinished(out)
    discard_unfinished(out)
    return Comparison(begun | {"finished": now()}, found, tokenizers, log.resumed)


def _refuse_twins(what: str, names: Sequence[str]) -> None:
    """Raise a ValueError where two names are one in files, where the results of one would replace the other's."""
    for place, name in enumerate(map(file_name, names)):
        if name in map(file_name, names[:place]):
            raise ValueError(f"Two {what} would be called {name!r} in the results: rename the folder of one of them.")


def _identity(
    models: Sequence[str | None], prompts: Sequence[Prompt], plan: Plan, about: dict[str, Any]
) -> dict[str, Any]:
    """What must be equal for a stopped run to go on."""
    named = (*models, plan.assistant, *plan.parts)
    facts = {
        "models": list(models),
        "model_or_drafter": {name: _contents(Path(name)) for name in named if name and Path(name).is_dir()},
        "prompts": fingerprint([asdict(prompt) for prompt in prompts]),
        "plan": asdict(plan),
        **{name: about[name] for name in ("commit", "device", "threads", "versions")},
    }
    read_back: dict[str, Any] = json.loads(json.dumps(facts))  # as the journal will hold it
    return read_back


def _contents(folder: Path) -> str:
    """SHA-256 over the names and bytes of a folder's files: a model or drafter may be saved anew under its name."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        with file.open("rb") as data:
            digest.update(f"{file.name} {hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _measure(
    subject: Subject, prompts: Sequence[Prompt], plan: Plan, watcher: Watcher, assistant: Any, log: Log
) -> list[Result]:
    """All cases of one model."""
    texts = encode_all(subject, prompts, plan.settings)
    lessons = [] if set(plan.parts).isdisjoint(WITH_WARM_TRIE) else texts.lessons
    kit = make_kit(subject.inflated(plan.params), lessons, plan.settings, watcher, assistant)
    cases, results = plan.cases(), []
    for i, settings in enumerate(cases, 1):
        own, part = replace(kit, settings=settings), f"{i} of {len(cases)} ({settings.title}): "
        results.append(run_case(own, texts, plan.methods, watcher, log=log, part=part))
    return results
