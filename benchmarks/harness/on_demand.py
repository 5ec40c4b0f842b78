"""Drafters and models that an experiment trains itself where none is named.

What was trained is kept in the experiment's result folder, by everything that it depends on, and the next run with the
same folder takes it from there. The model answers the questions of the option `questions` (JSON lines, or a folder of
them), at most `train_questions` of them, or without any the prompts of the package that are not measured; these are
few, so figures of such a training say that it works and not how good it gets. Where an experiment has an option
`train_reference`, the questions' references in that field are learned instead of the model's answers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.setup import Setup
from draftree.drafting.folder import model_hash
from draftree.errors import install
from draftree.training.answers import AnswerOptions, fingerprint, make_data
from draftree.training.options import RECIPE, Question, TrainOptions, read_questions, template_of
from draftree.training.run import train

OPTIONS: dict[str, Any] = {
    **{"questions": "", "train_questions": 4000, "train_steps": 300, "train_max_length": 384},
    "train_learning_rate": 0.0,  # of every drafter; 0: the method's own
}
FOLDER = "trained-on-demand"
ANSWER = 128  # most tokens of an answer to learn from

Make = Callable[[Path, Path, TrainOptions], Any]  # data, folder to write, options


def asked(setup: Setup) -> list[Question]:
    """Return the questions to learn from; raise a ValueError if there are none."""
    field = setup.options.get("train_reference") or None
    if setup["questions"]:
        return read_questions([Path(setup["questions"]).expanduser()], setup["train_questions"], reference=field)
    if field:
        raise ValueError("The prompts of the package have no references: name rows that have by --set questions=.")
    others = [p for p in setup.prompts if p.warm][: setup["train_questions"]]
    if not others:
        raise ValueError("There are no prompts but the measured ones to train on: name some by --set questions=.")
    return [Question(number, p.id, p.set, (p.text,)) for number, p in enumerate(others)]


def answers(setup: Setup) -> Path:
    """Return the data set of the model's own answers to them, made where it is not there yet."""
    questions, field = asked(setup), setup.options.get("train_reference")
    out = place_of(setup) / f"answers-{_digest(setup, questions)}"
    setup.watcher.stage("answers to learn from", len(questions))
    given: dict[str, Any] = {"template": template_of(setup.tokenizer, None), "options": AnswerOptions(ANSWER)}
    given["progress"] = lambda *_: setup.watcher.step()
    make_data(setup.small, setup.tokenizer, answered(questions) if field else questions, out, **given)
    return out


def answered(questions: Sequence[Question]) -> list[Question]:
    """Return the first turns of questions with their references as given answers."""
    return [replace(one, turns=one.turns[:1], answers=(str(one.reference),)) for one in questions]


def made(setup: Setup, name: str, about: Any, make: Make) -> Path:
    """Return the folder that `make` writes, with a recipe at the end; the one that is kept where it is complete.

    `about` is what the result depends on besides model, questions and length of training.
    """
    steps, rate = setup["train_steps"], setup["train_learning_rate"] or None
    if "per_set" in setup.options:
        _ = setup.encoded  # refuses prompts that cannot be measured before anything is trained
    depends = [asked(setup), about, steps, setup["train_max_length"], *([rate] if rate else [])]
    out = place_of(setup) / f"{name}-{_digest(setup, depends)}"
    longest = setup["train_max_length"]
    options = TrainOptions(steps=steps, evaluations=1, max_length=longest, learning_rate=rate)  # looks at them
    if not (out / RECIPE).is_file():
        if find_spec("accelerate") is None:
            raise ValueError(f"Training needs accelerate: {install('train')}.")
        shutil.rmtree(out, ignore_errors=True)  # what a run that was killed has left is begun anew
        data = answers(setup)
        setup.watcher.stage(f"training of {name}, {steps} steps", None)
        make(data, out, options)
    return out


def drafter(setup: Setup, method: str, settings: dict[str, Any]) -> Any:
    """Return a drafter (or early head) of `method` trained for the model; see `draftree.training.run`."""

    def make(data: Path, out: Path, options: TrainOptions) -> None:
        train(method, setup.small, data, out, settings=settings, options=options, report=setup.watcher.say)

    return setup.trained(str(made(setup, method, settings, make)))


def remark(setup: Setup) -> str:
    """Return a sentence about the training on demand."""
    source = "the named questions" if setup["questions"] else "prompts of the package that are not measured"
    return f"Trained on demand: {setup['train_steps']} steps on answers to {len(asked(setup))} of {source}."


def _digest(setup: Setup, about: Any) -> str:
    return fingerprint([model_hash(setup.small), repr(about)])[:12]


def place_of(setup: Setup) -> Path:
    """Return the folder for what is trained, made where it is missing."""
    place = (setup.out or Path(_temporary().name)) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    return place


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for runs without a result folder."""
    return tempfile.TemporaryDirectory(prefix="draftree-")
