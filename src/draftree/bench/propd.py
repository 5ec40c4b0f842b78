"""`draftree bench propd`: experiments on early pruning, dynamic trees and merged drafters, after ProPD's tables.

Each leaves a table, a JSON file and a picture. Without other orders the drafters are a trie and those of the package,
on the embedded model or on an inflated one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftree.bench.analysis_setup import Findings
from draftree.bench.compare_case import Settings, split_prompts
from draftree.bench.findings_files import experiment_named
from draftree.bench.harness import Task
from draftree.bench.inflate.drafter import inflate_drafter
from draftree.bench.inflate.model import inflate
from draftree.bench.machine import describe, now
from draftree.bench.propd_batches import batch_sizes, worst_case
from draftree.bench.propd_cost import step_cost
from draftree.bench.propd_merge import merged
from draftree.bench.propd_models import calibration
from draftree.bench.propd_pruning import pruning
from draftree.bench.propd_regret import regret
from draftree.bench.propd_setup import ProPDSettings, ProPDSetup, answers_to, warm_trie
from draftree.demo_model import demo_model
from draftree.drafting import Drafter, Medusa, PromptLookup
from draftree.drafting.folder import demo_drafter
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.pruning import EarlyHead, demo_early_head

TRIE, PROMPT = "lookahead", "prompt-lookup"
TRAINED = ("bita", "hidden-transfer", "medusa")
STRANGE = 60  # texts of random tokens that a foreign trie has seen


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes:
        says: what it tells, in a line.
        paper: where ProPD has it.
        run: makes it.
        drafters: those that it takes where none are named.
        heads: whether it prunes.
    """

    says: str
    paper: str
    run: Callable[[ProPDSetup], Findings]
    drafters: tuple[str, ...] = (TRIE, "hidden-transfer", "medusa")
    heads: bool = False


EXPERIMENTS = {
    "pruning": Experiment(
        "what leaves inside the pass by layer and top-k, and what it costs in acceptance", "Table 2", pruning,
        (TRIE, *TRAINED), heads=True,
    ),
    "batch": Experiment(
        "speed over batch sizes: static trees of every size, dynamic ones, pruned or not", "Tables 1 and 3",
        batch_sizes, heads=True,
    ),
    "calibration": Experiment(
        "expected against real acceptance length, for every model of acceptance", "section 4.2", calibration,
        (TRIE, PROMPT, *TRAINED),
    ),
    "regret": Experiment(
        "dynamic sizes against the best static one, where text, batch and context change midway", "Figure 3", regret
    ),
    "worst-case": Experiment("what is left of plain speed where nothing can be guessed", "", worst_case),
    "merge": Experiment(
        "several drafters under one node budget against each alone", "", merged, (TRIE, "hidden-transfer", "bita")
    ),
    "step-cost": Experiment(
        "a step by its rows, here and on a GPU, and the sizes that would pay", "Figure 3", step_cost
    ),
}  # fmt: skip


def find_experiment(name: str | None) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: no such experiment, or no name.
    """
    return experiment_named(EXPERIMENTS, name)


def check_drafters(names: Sequence[str]) -> None:
    """ValueError where a drafter is unknown or named twice."""
    known = (TRIE, PROMPT, *TRAINED)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"There is no drafter {name!r} here: choose {', '.join(known)}.{hint}")
    if len(set(names)) < len(names):
        raise ValueError("A drafter is named twice: name each once.")


def run_experiment(
    experiment: str,
    prompts: Sequence[Prompt],
    settings: ProPDSettings,
    *,
    drafters: Sequence[str] = (),
    heads: Sequence[str] = (),
    params: str | None = None,
    watcher: Watcher | None = None,
) -> tuple[Findings, dict[str, Any]]:
    """Make an experiment; also what its result file says about it.

    Args:
        experiment: one of `EXPERIMENTS`.
        prompts: to measure on, and others beside them, which a trie has seen answered.
        settings: how much.
        drafters: by name; those of the experiment by default.
        heads: folders of early heads for the embedded model; the package's by default.
        params: inflate the embedded model to about so many parameters, as "100M"; None for the model itself.
        watcher: hears of progress.

    Raises:
        ValueError: an option that does not fit, before any work.
    """
    known = find_experiment(experiment)
    names = tuple(drafters) or known.drafters
    check_drafters(names)
    watcher = watcher or Watcher()
    small, tokenizer = demo_model()
    folders = [EarlyHead.from_pretrained(folder, small) for folder in heads] if known.heads else []
    if known.heads and not heads:
        folders = [demo_early_head(small)]
    model = small if params is None else inflate(small, params)
    found = folders if params is None else [inflate_drafter(head, model) for head in folders]
    how_many = Settings(settings.per_set, settings.max_new_tokens, warm_per_set=settings.warm_per_set)
    measured, others = split_prompts(prompts, how_many)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in measured]
    texts = answers_to(small, tokenizer, others, settings.max_new_tokens, watcher) if TRIE in names else []

    def trained(method: str) -> Drafter:
        held = demo_drafter(method, small)
        return held if params is None else inflate_drafter(held, model)

    def made(name: str) -> Callable[[], Drafter]:
        if name == TRIE:
            return lambda: warm_trie(texts)
        return PromptLookup if name == PROMPT else lambda: trained(name)

    vocabulary = int(model.config.vocab_size)
    strange = np.random.default_rng(0).integers(0, vocabulary, (STRANGE, settings.max_new_tokens)).tolist()
    foreign: dict[str, Callable[[], Drafter]] = {
        "trie of random tokens": lambda: warm_trie(strange),
        "untrained heads": lambda: Medusa.fresh(model),
    }
    about = {"experiment": experiment} | describe(model, None) | {"started": now()}
    if params is not None:
        about["model"] = f"the embedded model inflated to {params}"
    setup = ProPDSetup(model, {name: made(name) for name in names}, found, tasks, foreign, settings, watcher)
    findings = known.run(setup)
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "prompts": len(tasks),
        "sets": list(dict.fromkeys(prompt.set for prompt in measured)),
        "drafters": list(names),
    }
    return findings, about
