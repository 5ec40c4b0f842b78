"""Options of a training run, the same for all that is trained, and what every run begins with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.options import Longest, Threads, check_folder, use_threads

if TYPE_CHECKING:
    from draftree.training.options import TrainOptions

RATE = "At its top."


@dataclass(frozen=True)
class Run:
    """Options of a run."""

    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 4
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs.", show_default=False)] = None
    batch: Annotated[int, typer.Option(help="Rows of a pass, on each device.")] = 8
    accumulate: Annotated[int, typer.Option(help="Passes of an optimizer step.")] = 1
    learning_rate: Annotated[float | None, typer.Option(help=RATE, show_default="the method's own")] = None
    max_length: Longest = None
    evaluations: Annotated[int, typer.Option(help="How often the dev rows are scored.")] = 10
    dev_rows: Annotated[int, typer.Option(help="Most dev rows to score.")] = 256
    checkpoints: Annotated[int, typer.Option(help="How many are written over the run.")] = 10
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--fp32", help="Mixed precision.", show_default="where the device has it")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False
    threads: Threads = None

    def begin(self, out: Path) -> TrainOptions:
        """The same for the trainer, which will write into `out`; torch has its threads.

        Raises:
            ValueError: accelerate is missing, a value is out of range, or nothing can be written into `out`.
        """
        from importlib.util import find_spec

        if find_spec("accelerate") is None:
            raise ValueError("Training needs accelerate: pip install 'draftree[train]'.")
        from draftree.training.options import TrainOptions

        known = {field.name for field in dataclasses.fields(TrainOptions)}
        options = TrainOptions(**{name: value for name, value in vars(self).items() if name in known})
        check_folder(out)
        use_threads(self.threads)
        return options


@dataclass(frozen=True)
class MethodRun(Run):
    """Options of a run for what drafts inside the model."""

    splits: Annotated[
        int | None,
        typer.Option(help="Split points of a row and pass; 0 for all.", show_default="the method's"),
    ] = None
    half: Annotated[bool, typer.Option("--half", help="Store the weights in fp16.")] = False
