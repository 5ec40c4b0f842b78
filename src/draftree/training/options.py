"""Options of trainings; the command line takes its options from here.

What an option means is said where it is declared, as `Annotated[type, meaning]`. Nothing here imports torch, so that
`draftree train --help` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from draftree.errors import check_least
from draftree.files import read_json

RECIPE = "recipe.json"  # written last: the result is whole then
CHECKPOINTS = "checkpoints"  # the folder of Hugging Face's checkpoints
OTHERS = ("config.json", "draftree_config.json")  # of models and drafters
WHOLE = ("align",)  # methods whose result is a whole model; of the others it is a drafter
EPOCHS = 4.0


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of a run, the same for everything that is trained.

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
            raise ValueError("epochs is inf: say how many passes over the data a training makes.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("steps and epochs both say how long a training is: give one of them.")
        if self.resume and self.force:
            raise ValueError("resume goes on with what is there, and force replaces it: give one of them.")

    @property
    def passes(self) -> float:
        """Passes over the data, where there are no steps."""
        return EPOCHS if self.epochs is None else self.epochs

    def recorded(self) -> dict[str, Any]:
        """All of them but `resume` and `force`, which change nothing in the result."""
        return _values(self, TrainOptions)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a large model answers for a small one to learn, and on what BLEU is found.

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
        """Refuse what says how inputs are read where `data` is a data set with answers.

        Raises:
            ValueError: names the first such option.
        """
        for name in ("limit", "field", "template"):
            if getattr(self, name) is not None and (self.dev is None or name == "limit"):
                raise ValueError(f"--{name} is for inputs, and {str(self.data)!r} holds answers: leave it out.")


def _values(options: Any, kind: type) -> dict[str, Any]:
    """The options that `kind` declares, whatever the command line adds, but `resume` and `force`."""
    return {one.name: getattr(options, one.name) for one in fields(kind) if one.name not in ("resume", "force")}


def check_out(out: Path, method: str, *, force: bool) -> None:
    """Refuse a folder with a finished result, unless `force` replaces it by one of the same kind.

    Raises:
        ValueError: there is one, or the folder holds a model or drafter of another source.
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
    """Refuse the first of these options that is given and not more than 0.

    Raises:
        ValueError: names it.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: give more than 0.")
