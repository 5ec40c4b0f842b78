"""Options of a training run, the same for all that is trained, and what every run begins with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.options import DataSet, Longest, Model, check_folder
from draftree.errors import install
from draftree.training.options import EPOCHS, TrainOptions, check_out

RATE = "Peak learning rate."


@dataclass(frozen=True)
class Material:
    """What is trained from what, and where the result goes."""

    data: DataSet
    out: Annotated[Path, "Folder for what is trained, its recipe, curve and checkpoints."]
    model: Model = None


@dataclass(frozen=True)
class Run(TrainOptions):
    """Options of a run: those of the library, and those that a terminal shows in another way."""

    epochs: Annotated[float | None, typer.Option(help="Passes over the data.", show_default=f"{EPOCHS:g}")] = None
    learning_rate: Annotated[float | None, typer.Option(help=RATE, show_default="the method's own")] = None
    max_length: Longest = None
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--fp32", help="Mixed precision.", show_default="where the device has it")
    ] = None

    def begin(self, out: Path, method: str) -> None:
        """Raise a ValueError where accelerate is missing, `out` cannot be written to, or holds a finished result."""
        from importlib.util import find_spec

        if find_spec("accelerate") is None:
            raise ValueError(f"Training needs accelerate: {install('train')}.")
        check_folder(out)
        if not self.resume:
            check_out(out, method, force=self.force)


@dataclass(frozen=True)
class MethodRun(Run):
    """Options of a run for what drafts inside the model."""

    splits: Annotated[
        int | None, typer.Option(help="Split points of a row and pass; 0 for all.", show_default="the method's")
    ] = None
    half: Annotated[bool, "Store the weights in fp16."] = False
