"""Declare the options of a training; the command line takes its options from here.

Each field is declared as `Annotated[type, meaning]`. This file does not import torch, so that `draftree train --help`
answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from draftree.errors import check_least
from draftree.files import read_json

RECIPE = "recipe.json"  # This file is written last and marks a finished result.
CHECKPOINTS = "checkpoints"  # Hugging Face's checkpoints lie in this folder.
OTHERS = ("config.json", "draftree_config.json")  # Models and drafters have these files.
WHOLE = ("align",)  # The result of these methods is a whole model; of all others, a drafter.
EPOCHS = 4.0


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Hold the options that every run has.

    Raises:
        ValueError: a value out of range.
    """

    epochs: Annotated[float | None, "Passes over the data; 4 where no steps are given."] = None
    steps: Annotated[int | None, "Optimizer steps, instead of epochs."] = None
    batch: Annotated[int, "Rows of a pass, on each device."] = 8
    accumulate: Annotated[int, "Passes of an optimizer step."] = 1
    learning_rate: Annotated[float | None, "Peak learning rate; None for the method's own."] = None
    max_length: Annotated[int | None, "Leave out rows with more tokens."] = None
    evaluations: Annotated[int, "How often the dev rows are scored."] = 10
    dev_rows: Annotated[int, "Most dev rows to score."] = 256
    checkpoints: Annotated[int, "How many are written over the run."] = 10
    seed: Annotated[int, "Of everything drawn."] = 0
    bf16: Annotated[bool | None, "Mixed precision; None where the device has it."] = None
    resume: Annotated[bool, "Go on from the last checkpoint in --out."] = False
    force: Annotated[bool, "Replace a finished result in --out."] = False

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "batch", "accumulate", "evaluations", "dev_rows", "checkpoints")
        check_positive(self, "steps", "learning_rate", "max_length")
        check_least(0, 2**32 - 1, seed=self.seed)
        if self.passes == math.inf:
            raise ValueError("epochs is inf: give a finite number of passes over the data.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("steps and epochs both say how long a training is: give one of them.")
        if self.resume and self.force:
            raise ValueError("resume goes on with what is there, and force replaces it: give one of them.")

    @property
    def passes(self) -> float:
        """Return the passes over the data; used if `steps` is None."""
        return EPOCHS if self.epochs is None else self.epochs

    def recorded(self) -> dict[str, Any]:
        """Return all options but `resume` and `force`, which do not change the result."""
        names = (one.name for one in fields(TrainOptions))
        return {name: getattr(self, name) for name in names if name not in ("resume", "force")}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Name the inputs that a large model answers for a small one, and the rows for BLEU.

    Raises:
        ValueError: a limit out of range.
    """

    data: Annotated[Path, "Inputs (JSON lines, or a folder of them), or a data set that draftree train data made."]
    field: Annotated[str | None, "Where a row has its input; by default turns, prompt or question."] = None
    dev: Annotated[Path | None, "Rows for BLEU before and after; by default inputs kept out of training."] = None
    reference: Annotated[str | None, "Where a row has its reference, for BLEU; by default there is no BLEU."] = None
    template: Annotated[
        str | None,
        "full, short, or a text with {question} in it; by default short, or the bare input without a chat template.",
    ] = None
    limit: Annotated[int | None, "Most inputs, taken evenly from the files."] = None

    def __post_init__(self) -> None:
        check_positive(self, "limit")

    def refuse_for_answers(self) -> None:
        """Refuse options for reading inputs if `data` is a data set with answers.

        Raises:
            ValueError: one of them is given.
        """
        for name in ("limit", "field", "template"):
            if getattr(self, name) is not None and (self.dev is None or name == "limit"):
                raise ValueError(f"--{name} is for inputs, and {str(self.data)!r} holds answers: leave it out.")


def check_out(out: Path, method: str, *, force: bool) -> None:
    """Refuse a folder with a finished result, unless `force` replaces it by one of the same kind.

    Raises:
        ValueError: the folder holds a finished result, or a model or drafter of another source.
    """
    if (out / RECIPE).is_file():
        if not force:
            raise ValueError(f"{str(out)!r} holds a finished result: give another folder, or --force to replace it.")
        before = read_json(out / RECIPE).get("method")
        if before is not None and (before in WHOLE) != (method in WHOLE):
            raise ValueError(
                f"{str(out)!r} holds a result of {before}, whose files one of {method} would not replace: give another "
                "folder, or remove that one."
            )
    elif any((out / name).is_file() for name in OTHERS) and not (out / CHECKPOINTS).is_dir():
        raise ValueError(f"{str(out)!r} holds a model or drafter that no training here has left: give another folder.")


def check_positive(options: Any, *names: str) -> None:
    """Refuse options that are given and not more than 0.

    Raises:
        ValueError: names the first such option.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: give more than 0.")
