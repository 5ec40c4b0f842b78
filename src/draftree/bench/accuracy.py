"""`draftree bench accuracy`: experiments on trained drafters, named after the papers' tables and figures.

What a drafter guesses right, how its states come near the real ones, how far its trees are walked. Each experiment
leaves a table, a JSON file and a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftree.bench import analysis_sweeps as sweeps
from draftree.bench.analysis_accuracy import draft_accuracy
from draftree.bench.analysis_clock import wall_clock
from draftree.bench.analysis_compare import acceptance
from draftree.bench.analysis_setup import AccuracySettings, Findings, Setup, Subject
from draftree.bench.analysis_states import pseudo_cosine
from draftree.bench.analysis_trees import checked_kinds, with_depth
from draftree.bench.compare_case import Settings, split_prompts
from draftree.bench.findings_files import experiment_named
from draftree.bench.harness import Task
from draftree.bench.inflate.drafter import inflate_drafter
from draftree.bench.inflate.model import inflate
from draftree.bench.machine import describe, now
from draftree.drafting.folder import CONFIG, Trained
from draftree.drafting.in_model import InModelDrafter
from draftree.engine.limits import check_prompt
from draftree.host import inspect_model
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt

IN_MODEL = ("bita", "hidden-transfer", "medusa")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One analysis.

    Attributes:
        says: what it tells, in a line.
        paper: where the papers have it.
        methods: whose drafters it takes.
        run: makes it.
        budgets: guesses a step, where none are asked for.
    """

    says: str
    paper: str
    methods: tuple[str, ...]
    run: Callable[[Setup], Findings]
    budgets: tuple[int, ...] = (4, 8, 16, 32)


EXPERIMENTS = {
    "draft-accuracy": Experiment(
        "the truth among the best 1 to 10 guesses, depth by depth",
        "Hidden Transfer, Figure 3",
        (*IN_MODEL, "early-head"),
        draft_accuracy,
    ),
    "pseudo-cosine": Experiment(
        "similarity of pseudo and real hidden states by layer",
        "Hidden Transfer, Figure 4",
        ("hidden-transfer",),
        pseudo_cosine,
    ),
    "acceptance": Experiment(
        "tokens a step with every kind of tree at equal node budgets",
        "BiTA, Table 4; Hidden Transfer, Tables 2 to 5",
        IN_MODEL,
        acceptance,
    ),
    "wall-clock": Experiment(
        "tokens a second with small trees, and the rows, step time and acceptance that make them",
        "Hidden Transfer, Table 1; BiTA, Table 1",
        IN_MODEL,
        wall_clock,
        (1, 2, 4, 8),
    ),
    "transfer-layer": Experiment(
        "accuracy against the layer of the transfer, over drafters trained for several",
        "Hidden Transfer, Figures 5 and 6",
        ("hidden-transfer",),
        sweeps.transfer_layer,
    ),
    "prompt-tokens": Experiment(
        "masks only, shallow and deep prompts, over drafters trained with several numbers of them",
        "BiTA, Table 3 and Figure 8",
        ("bita",),
        sweeps.prompt_tokens,
    ),
    "mask-tokens": Experiment(
        "how many masks, over drafters trained with several numbers of them",
        "BiTA, Figure 9",
        ("bita",),
        sweeps.mask_tokens,
    ),
}


def find_experiment(name: str | None) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: no such experiment, or no name.
    """
    return experiment_named(EXPERIMENTS, name)


def named_folders(given: Sequence[str], experiment: str, model: str | None) -> dict[str, str]:
    """Folder or hub repository of every drafter by the name that tables give it.

    Args:
        given: `name=folder` each, or a folder alone, which is called by its last part. For the embedded model a
            method's word stands for the drafter of the package, unless there is a folder of that name.
        experiment: where none is given, it gets those drafters of the package that it takes.
        model: folder or hub name; None for the embedded one.

    Raises:
        ValueError: none given, one that is empty, or two of one name.
    """
    here = Path(str(files("draftree") / "data" / "drafters"))
    methods = find_experiment(experiment).methods
    shipped = {} if model is not None else {m: str(here / m) for m in methods if (here / m / CONFIG).is_file()}
    found: dict[str, str] = {}
    for entry in given:
        name, sign, folder = entry.partition("=")
        if not sign:
            name, folder = Path(entry).name, entry
        if not name or not folder:
            raise ValueError(f"--drafter is {entry!r}: give name=folder.")
        if name in found:
            raise ValueError(f"Two drafters are called {name!r}: give each a name of its own, as name=folder.")
        found[name] = folder if Path(folder).is_dir() else shipped.get(folder, folder)
    found = found or shipped
    if not found:
        raise ValueError(f"{experiment} has no drafter to look at: add --drafter name=folder, once for each.")
    return found


def load_subjects(folders: dict[str, str], experiment: str, model: Any, depth: int | None = None) -> list[Subject]:
    """The drafters in `folders`, read for `model`.

    Args:
        folders: of `named_folders`.
        experiment: one of `EXPERIMENTS`.
        model: the model that they were trained for.
        depth: let each guess at most so many tokens ahead; None for all that it was trained for.

    Raises:
        ValueError: a folder that is missing or does not fit the model, or a method that the experiment does not take.
    """
    subjects = []
    for name, folder in folders.items():
        try:
            trained = Trained.from_pretrained(folder, model)
        except ValueError as error:
            raise ValueError(f"Drafter {name!r}: {error}") from None
        methods = find_experiment(experiment).methods
        if trained.method not in methods:
            raise ValueError(
                f"{experiment} takes drafters of {' or '.join(methods)}, and {name!r} holds {trained.method}: leave it "
                "out."
            )
        if depth is not None and isinstance(trained, InModelDrafter):
            trained = with_depth(trained, depth)
        subjects.append(Subject(name, trained))
    return subjects


def inflated(model: Any, subjects: Sequence[Subject], params: str) -> tuple[Any, list[Subject]]:
    """The model inflated to about so many parameters, as "100M", and drafters that guess the same for it.

    Raises:
        ValueError: a model that cannot be inflated, or to so many.
    """
    large = inflate(model, params)
    return large, [Subject(s.name, inflate_drafter(s.trained, large)) for s in subjects]


def run_experiment(
    experiment: str,
    model: Any,
    tokenizer: Any,
    subjects: Sequence[Subject],
    prompts: Sequence[Prompt],
    settings: AccuracySettings,
    *,
    name: str | None = None,
    watcher: Watcher | None = None,
) -> tuple[Findings, dict[str, Any]]:
    """Make an experiment; also what its result file says about it.

    Args:
        experiment: one of `EXPERIMENTS`.
        model, tokenizer: a decoder-only model and its tokenizer.
        subjects: of `load_subjects`.
        prompts: to measure on, and others beside them.
        settings: how much.
        name: the model's folder or hub name, None for the embedded one.
        watcher: hears of progress.

    Raises:
        ValueError: a model, prompt or setting that does not fit, before any work.
    """
    target = inspect_model(model)
    if target.encoder_decoder:
        raise ValueError("bench accuracy measures decoder-only models: this one has an encoder.")
    checked_kinds(settings.trees)
    how_many = Settings(settings.per_set, settings.max_new_tokens, warm_per_set=settings.search_per_set)
    measured, others = split_prompts(prompts, how_many)
    encoded = [(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in [*measured, *others]]
    for prompt, ids in encoded:
        try:
            check_prompt(ids, settings.max_new_tokens, target.vocab_size, target.max_positions)
        except ValueError as error:
            raise ValueError(f"Prompt {prompt.id!r}: {error}") from None
    tasks = [Task(prompt, ids) for prompt, ids in encoded[: len(measured)]]
    lessons = [ids for _, ids in encoded[len(measured) :]]
    about = {"experiment": experiment} | describe(model, name) | {"started": now()}
    findings = find_experiment(experiment).run(Setup(model, subjects, tasks, lessons, settings, watcher or Watcher()))
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "prompts": len(tasks),
        "sets": list(dict.fromkeys(prompt.set for prompt in measured)),
        "drafters": {
            s.name: {"method": s.method, "settings": s.trained.settings, "recipe": s.trained.recipe} for s in subjects
        },
    }
    return findings, about
