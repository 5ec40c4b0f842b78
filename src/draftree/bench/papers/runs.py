"""How an experiment of the papers is run here: through the benchmark that measures it, small unless more is asked for.

Many of the papers' tables are measured by `bench accuracy` or `bench propd` under names of their own. An entry of the
registry points there; what is measured, and how, is never written twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftree.bench import accuracy, propd
from draftree.bench.analysis_setup import AccuracySettings, Findings
from draftree.bench.bild import BildSettings, run_bild
from draftree.bench.bild_open import open_pair
from draftree.bench.bild_show import findings_of
from draftree.bench.compare_case import Settings, split_prompts
from draftree.bench.harness import Task
from draftree.bench.inflate.drafter import inflate_drafter
from draftree.bench.inflate.model import inflate
from draftree.bench.machine import describe, now
from draftree.bench.papers.lookahead import LookaheadSetup
from draftree.bench.propd_setup import ProPDSettings, answers_to
from draftree.demo_model import demo_model
from draftree.drafting import Drafter
from draftree.drafting.early_exit import early_exit_model
from draftree.drafting.folder import demo_drafter
from draftree.host import inspect_model
from draftree.models import encode_prompt, load_model
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.training.align_inputs import template_of
from draftree.training.questions import Question

Made = tuple[Findings, dict[str, Any]]
NEW, PER_SET, NODES, WARM = 64, 1, 16, 8  # of a quick run
THRESHOLDS = tuple((fallback, rollback) for fallback in (0.3, 0.6, 0.9) for rollback in (1.0, 3.0, 8.0))
WINDOWS = (3, 6, 10)
NO_TRIE = "has no trie to warm"
NO_TREES = ("draft-accuracy", "pseudo-cosine")  # of `bench accuracy`: recorded guesses, and no runs with them


@dataclass(frozen=True, slots=True)
class Asked:
    """What to run, and how much of it.

    Attributes:
        prompts: to measure on, and others beside them.
        per_set, max_new_tokens, nodes, warm_per_set: as in the other benchmarks; None for a quick run's.
        drafters: by name or name=folder; the experiment's own where there are none.
        params: inflate the embedded model to about so many parameters; None for the model itself.
        watcher: hears of progress.
    """

    prompts: Sequence[Prompt]
    per_set: int | None = None
    max_new_tokens: int | None = None
    nodes: int | None = None
    warm_per_set: int | None = None
    drafters: tuple[str, ...] = ()
    params: str | None = None
    watcher: Watcher = field(default_factory=Watcher)

    def of(self, sets: Sequence[str]) -> list[Prompt]:
        """The prompts of these sets, all of them where none is there."""
        chosen = [prompt for prompt in self.prompts if prompt.set in sets]
        return chosen or list(self.prompts)


Runner = Callable[[Asked], Made]


def refuse(asked: Asked, reasons: Mapping[str, str]) -> None:
    """Refuse options that an experiment would ignore.

    Args:
        asked: what was asked for.
        reasons: by name in `Asked`, what the experiment does instead.

    Raises:
        ValueError: one of them was given.
    """
    for name, why in reasons.items():
        if getattr(asked, name) not in (None, ()):
            option = "drafter" if name == "drafters" else name.replace("_", "-")
            raise ValueError(f"This experiment {why}: leave --{option} out.")


def with_ways(measure: Callable[[LookaheadSetup], Findings], **ignored: str) -> Runner:
    """Ways of decoding side by side on one model, with a trie that has seen other answers; see `refuse`."""

    def run(asked: Asked) -> Made:
        refuse(asked, {"drafters": "sets fixed drafters side by side"} | ignored)
        new, nodes = asked.max_new_tokens or NEW, asked.nodes or NODES
        warm = WARM if asked.warm_per_set is None else asked.warm_per_set
        small, tokenizer = demo_model()
        model = small if asked.params is None else inflate(small, asked.params)

        def trained(name: str) -> Drafter:
            drafter = demo_drafter(name, small)
            return drafter if asked.params is None else inflate_drafter(drafter, model)

        measured, others = split_prompts(asked.prompts, Settings(asked.per_set or PER_SET, new, warm_per_set=warm))
        tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in measured]
        about = describe(model, None) | {"started": now()}
        if asked.params is not None:
            about["model"] = f"the embedded model inflated to {asked.params}"
        texts = [] if "warm_per_set" in ignored else answers_to(small, tokenizer, others, new, asked.watcher)
        sets = list(dict.fromkeys(prompt.set for prompt in measured))
        setup = LookaheadSetup(model, tasks, texts, len(sets), nodes, new, asked.watcher, trained)
        findings = measure(setup)
        settings = {"max_new_tokens": new, "nodes": nodes, "warm_answers": len(texts)}
        return findings, about | {"finished": now(), "settings": settings, "prompts": len(tasks), "sets": sets}

    return run


def by_accuracy(experiment: str, methods: tuple[str, ...], sets: tuple[str, ...] = (), **settings: Any) -> Runner:
    """`draftree bench accuracy EXPERIMENT` with the package's drafters of `methods`, on some sets of prompts."""

    def run(asked: Asked) -> Made:
        reasons = {"params": "looks at drafters on the embedded model itself", "warm_per_set": NO_TRIE}
        if experiment in NO_TREES:
            reasons["nodes"] = "verifies no trees"
        refuse(asked, reasons)
        given = list(asked.drafters) or list(methods)
        folders = accuracy.named_folders(given, experiment, None)
        chosen = AccuracySettings(
            asked.per_set or PER_SET,
            asked.max_new_tokens or NEW,
            **({"budgets": accuracy.find_experiment(experiment).budgets} | settings)
            | ({"budgets": (asked.nodes,)} if asked.nodes else {}),
        )
        model, tokenizer = demo_model()
        subjects = accuracy.load_subjects(folders, experiment, model)
        return accuracy.run_experiment(
            experiment, model, tokenizer, subjects, asked.of(sets), chosen, watcher=asked.watcher
        )

    return run


def by_propd(experiment: str, drafters: tuple[str, ...], **settings: Any) -> Runner:
    """`draftree bench propd EXPERIMENT`."""

    def run(asked: Asked) -> Made:
        if propd.TRIE not in (asked.drafters or drafters):
            refuse(asked, {"warm_per_set": NO_TRIE})
        given = {"per_set": asked.per_set, "max_new_tokens": asked.max_new_tokens, "nodes": asked.nodes}
        given |= {"warm_per_set": asked.warm_per_set}
        quick = {"per_set": PER_SET, "max_new_tokens": NEW} | settings
        chosen = ProPDSettings(**(quick | {name: value for name, value in given.items() if value is not None}))
        return propd.run_experiment(
            experiment,
            asked.prompts,
            chosen,
            drafters=asked.drafters or drafters,
            params=asked.params,
            watcher=asked.watcher,
        )

    return run


def by_bild(*, ablations: bool = False, early_exit: bool = False) -> Runner:
    """`draftree bench bild` on the embedded pair, or on a model and its first layers: ROUGE-L against the large model's
    own texts, a small grid.
    """

    def run(asked: Asked) -> Made:
        refuse(asked, {"params": "has models of its own", "nodes": "has turns of its own", "warm_per_set": NO_TRIE})
        if early_exit:
            large, tokenizer, smalls = exit_pair(asked.drafters)
        else:
            refuse(asked, {"drafters": "has a pair of models of its own"})
            large, tokenizer, smalls = open_pair(None, None, None)
        measured, _ = split_prompts(asked.prompts, Settings(asked.per_set or PER_SET, warm_per_set=0))
        rows = [Question(i, p.id, p.set, (p.text,)) for i, p in enumerate(measured)]
        settings = BildSettings(
            THRESHOLDS,
            WINDOWS,
            "rouge-l",
            timed=len(rows),
            max_new_tokens=asked.max_new_tokens or NEW,
            ablations=ablations,
            examples=1,
        )
        with TemporaryDirectory() as folder:  # of texts, which a quick run makes anew
            result = run_bild(
                large,
                tokenizer,
                smalls,
                rows,
                template_of(tokenizer, None),
                settings,
                Path(folder),
                watcher=asked.watcher,
            )
        return findings_of(result), result.about

    return run


def exit_pair(folders: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """(large model, tokenizer, its first layers as the small one).

    What `draftree train early-exit` wrote, up to the layer it was trained for; without a folder the embedded model up
    to its middle, which nobody trained to be read there.

    Raises:
        ValueError: several folders, or one that holds no such model.
    """
    if len(folders) > 1:
        raise ValueError("This experiment has one model: name by --drafter one folder of draftree train early-exit.")
    large, tokenizer = load_model(folders[0] if folders else None)
    if not folders:
        layer = len(inspect_model(large).layers) // 2
        return large, tokenizer, {f"first {layer} layers, not trained for it": early_exit_model(large, layer)}
    try:
        layer = int(json.loads((Path(folders[0]) / "recipe.json").read_text(encoding="utf-8"))["exit_layer"])
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{folders[0]} holds no early exit: give a folder of draftree train early-exit.") from None
    return large, tokenizer, {f"first {layer} layers": early_exit_model(large, layer)}


def given_drafters(runner: Runner, how: str) -> Runner:
    """A sweep over drafters that have to be trained first; `how` says by which commands."""

    def run(asked: Asked) -> Made:
        if len(asked.drafters) < 2:
            raise ValueError(f"This experiment compares drafters of several settings: train them, as {how}, and name "
                             "each by --drafter.")  # fmt: skip
        return runner(asked)

    return run


def told(asked: Asked) -> dict[str, Any]:
    """What was asked for, for the result file; of drafters their names, and not where they lie."""
    names = (part.name for part in fields(asked) if part.name not in ("prompts", "watcher"))
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) not in (None, ())}
    if asked.drafters:
        given["drafters"] = [Path(entry.partition("=")[0]).name for entry in asked.drafters]
    return given
