"""Declare the options of a training; the command line takes its options from here.

Each field is declared as `Annotated[type, meaning]`. This file does not import torch, so that `draftree train --help`
answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from draftree.errors import check_least

RECIPE = "recipe.json"  # Written last; it marks a finished result.
CHECKPOINTS = "checkpoints"  # Folder of Hugging Face's checkpoints.
OTHERS = ("config.json", "draftree_config.json")  # Models and drafters have these files.
EPOCHS = 4.0


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Hold the options of every run.

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
    seed: Annotated[int, "Seed of the weights, the order of rows and dropout."] = 0
    bf16: Annotated[bool | None, "Mixed precision; None where the device has it."] = None
    resume: Annotated[bool, "Continue from the last checkpoint in --out."] = False
    force: Annotated[bool, "Replace a finished result in --out."] = False

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "batch", "accumulate", "evaluations", "dev_rows", "checkpoints")
        check_positive(self, "steps", "learning_rate", "max_length")
        check_least(0, 2**32 - 1, seed=self.seed)
        if self.epochs is not None and self.steps is not None:
            raise ValueError("steps and epochs both set the length of a training: give one of them.")
        if self.resume and self.force:
            raise ValueError("resume continues a run and force replaces it: give one of them.")

    @property
    def passes(self) -> float:
        """Return the passes over the data; used if `steps` is None."""
        return EPOCHS if self.epochs is None else self.epochs

    def recorded(self) -> dict[str, Any]:
        """Return all options but `resume` and `force`, which do not change the result."""
        names = {one.name for one in fields(TrainOptions)} - {"resume", "force"}
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Name the inputs that a large model answers for a small one.

    Raises:
        ValueError: a limit out of range.
    """

    data: Annotated[Path, "Inputs (JSON lines, or a folder of them), or a data set that draftree train data made."]
    field: Annotated[str | None, "A row's field with its input; by default turns, prompt or question."] = None
    template: Annotated[
        str | None,
        "full, short, or a text with {question} in it; by default short, or the bare input without a chat template.",
    ] = None
    limit: Annotated[int | None, "Most inputs, taken evenly from the files."] = None

    def __post_init__(self) -> None:
        check_positive(self, "limit")


def check_out(out: Path, *, force: bool) -> None:
    """Refuse a folder with a finished result, unless `force` replaces it.

    Raises:
        ValueError: the folder holds a finished result, or a model or drafter of another source.
    """
    if (out / RECIPE).is_file():
        if not force:
            raise ValueError(f"{str(out)!r} holds a finished result: give another folder, or --force to replace it.")
    elif any((out / name).is_file() for name in OTHERS) and not (out / CHECKPOINTS).is_dir():
        raise ValueError(f"{str(out)!r} holds a model or drafter that no training here has left: give another folder.")


def check_positive(options: Any, *names: str) -> None:
    """Raise a ValueError that names the first given option which is not more than 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: give more than 0.")
