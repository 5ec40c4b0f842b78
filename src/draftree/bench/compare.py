"""`draftree bench compare`: methods x models x batch sizes x sampling, all on the same prompts.

A model's cases come one after the other; inside a case every prompt is answered by every method before the next one
comes. Two more things are measured for each model: what a step costs by its rows, and the *plane*, in which every
drafter, every pair of drafters and all of them together verify equally many guesses in every step, so that what a tree
brings (accepted length) and what it costs (time to verify) can be told apart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from draftree.bench.compare_case import Result, Settings, encode_all, run_case, teach
from draftree.bench.compare_log import CaseLog
from draftree.bench.compare_methods import LABELS, PLAIN, SMALL, TRAINED, WARM, Kit, LeftOutError
from draftree.bench.machine import describe, now
from draftree.bench.methods import Sampling
from draftree.host import open_host
from draftree.host.cost import measure_cost
from draftree.models import load_model
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.training.journal import Journal, fingerprint

MERGED = f"{WARM}+hidden_transfer"
METHODS = (*LABELS, MERGED)
SOURCES = (WARM, SMALL, *TRAINED)  # of the plane
JOURNAL = ".bench-compare"  # folder of an unfinished run, among the results


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare.

    Attributes:
        settings: of all cases; batch, sampling and fixed trees are set here.
        methods: names, see `compare_methods`.
        batches, samplings: every one of these with every one of those is a case.
        plane_per_set: prompts of every set for the plane; 0 leaves it out.
        plane_guesses: guesses of every step there.
    """

    settings: Settings
    methods: tuple[str, ...] = METHODS
    batches: tuple[int, ...] = (1, 4)
    samplings: tuple[Sampling | None, ...] = (None, Sampling(0.8))
    plane_per_set: int = 1
    plane_guesses: int = 8

    def cases(self) -> list[Settings]:
        """Settings of every case, greedy ones first."""
        return [replace(self.settings, batch=b, sampling=s) for s in self.samplings for b in self.batches]

    @property
    def plane(self) -> Settings:
        """Settings of the plane; its prompts are among the measured ones, since others may have taught the trie."""
        count = min(self.plane_per_set, self.settings.per_set)
        return replace(self.settings, per_set=count, rounds=1, fixed=self.plane_guesses, compiled=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found on one model.

    Attributes:
        model: its name.
        cases: one result each.
        plane: the result of the plane; None where it was left out.
        costs: by host, `rows` and `seconds` of a step with so many.
    """

    model: str
    cases: list[Result]
    plane: Result | None
    costs: dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A finished comparison.

    Attributes:
        about: commit, device, threads, command, versions and times.
        models: what was found on each.
        resumed: answers' groups that came from a run that had been stopped.
    """

    about: dict[str, Any]
    models: list[Measured]
    resumed: int


def run_compare(
    models: Sequence[str | None],
    prompts: Sequence[Prompt],
    plan: Plan,
    out: Path,
    watcher: Watcher,
    *,
    assistant: str | None = None,
) -> Comparison:
    """Measure everything, or go on where a run of the same plan was stopped.

    Args:
        models: folders or hub names; None is the embedded model.
        prompts: to measure on and to warm tries with.
        plan: what to compare.
        out: folder for the results, and for the journal of an unfinished run.
        watcher: hears of progress.
        assistant: folder or hub name of a small model for all models; None takes the embedded model's own.

    Raises:
        ValueError: a model, prompt or drafter that cannot be used, or an unfinished run of another plan; before any
            work.
    """
    small = None if assistant is None else load_model(assistant)[0]
    held: list[tuple[Any, Any]] = []
    for name in models:
        held = [load_model(name)]  # one at a time, as they may be large
        model, tokenizer = held[0]
        for settings in plan.cases():
            encode_all(model, tokenizer, prompts, settings)
        Kit(model, plan.settings.max_new_tokens, assistant=small, compiled=False).methods(plan.methods)
    begun = describe(model, models[0]) | {"started": now()}
    folder = out / JOURNAL
    with Journal(folder, _identity(models, prompts, plan, begun, assistant)) as journal:
        entries = journal.entries()
        found = []
        for number, name in enumerate(models):
            if len(models) > 1:
                held = [load_model(name)]
            first = number * (len(plan.cases()) + 1)
            found.append(_measure(held[0], name, prompts, plan, watcher, small, journal, entries, first))
    shutil.rmtree(folder)
    return Comparison(begun | {"finished": now()}, found, len(entries))


def _identity(
    models: Sequence[str | None], prompts: Sequence[Prompt], plan: Plan, about: dict[str, Any], assistant: str | None
) -> dict[str, Any]:
    """What must be equal for a stopped run to go on."""
    facts = {
        "models": list(models),
        "assistant": assistant,
        "prompts": fingerprint([asdict(prompt) for prompt in prompts]),
        "methods": plan.methods,
        "plan": asdict(plan),
        **{name: about[name] for name in ("commit", "device", "threads", "versions")},
    }
    same: dict[str, Any] = json.loads(json.dumps(facts))  # as it will be read back
    return same


def _measure(
    loaded: tuple[Any, Any],
    name: str | None,
    prompts: Sequence[Prompt],
    plan: Plan,
    watcher: Watcher,
    small: Any,
    journal: Journal,
    entries: dict[int, list[dict[str, Any]]],
    first: int,
) -> Measured:
    model, tokenizer = loaded
    texts = encode_all(model, tokenizer, prompts, plan.settings)
    warm = teach(model, tokenizer, texts, plan.settings, watcher)
    kit = Kit(model, plan.settings.max_new_tokens, None, warm, small, plan.settings.compiled)
    cases = plan.cases()
    results = []
    for i, settings in enumerate(cases):
        own = replace(kit, sampling=settings.sampling, fixed=settings.fixed)
        log = CaseLog(journal, entries, first + i)
        part = f"{i + 1} of {len(cases)} ({settings.title}): "
        results.append(
            run_case(own, tokenizer, texts, settings, plan.methods, name=name, watcher=watcher, log=log, part=part)
        )
    plane = None
    if plan.plane_per_set:
        settings = plan.plane
        texts = encode_all(model, tokenizer, prompts, settings)
        own = replace(kit, fixed=settings.fixed, compiled=False)
        log = CaseLog(journal, entries, first + len(cases))
        plane = run_case(
            own, tokenizer, texts, settings, plane_names(own), name=name, watcher=watcher, log=log, part="plane: "
        )
    watcher.stage("steps by their rows", None)
    return Measured(results[0].about["model"], results, plane, _costs(model))


def plane_names(kit: Kit) -> list[str]:
    """Plain decoding, every drafter that can be had, every pair of them, and all together."""
    sources = []
    for name in SOURCES:
        try:
            kit.maker(name)
        except LeftOutError:
            continue
        sources.append(name)
    pairs = ["+".join(pair) for pair in combinations(sources, 2)]
    full = ["+".join(sources)] if len(sources) > 2 else []
    return [PLAIN, "draftree_hooked", *sources, *pairs, *full]


def _costs(model: Any) -> dict[str, dict[str, list[float]]]:
    found = {}
    for host in ("loop", "hooked"):
        try:
            cost = measure_cost(open_host(model, host))
        except ValueError:  # not every model qualifies for the loop host
            continue
        found[host] = {"rows": cost.rows.tolist(), "seconds": cost.seconds.tolist()}
    return found
