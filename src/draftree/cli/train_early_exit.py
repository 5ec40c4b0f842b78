"""`draftree train early-exit`: a copy of a model whose head also reads its first layers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from draftree.cli.options import grouped
from draftree.cli.train_run import RATE, Material, Run
from draftree.cli.where import Where


@dataclass(frozen=True)
class ExitRun(Run):
    """Options of such a run."""

    learning_rate: Annotated[float | None, typer.Option(help=RATE, show_default="3e-4")] = None


@grouped
def early_exit(
    *,
    material: Material,
    where: Where,
    exit_layer: Annotated[int, "n, layers that the exit runs."],
    every_layer: Annotated[bool, "Train every layer to be read, for LossyCALM, not this one alone."] = False,
    run: ExitRun,
) -> None:
    """A copy of the WHOLE model, trained to be read behind layer n (early-exit pairs of BiLD): its texts change."""
    run.begin(material.out, "early-exit")
    from draftree.cli.screen import resumable
    from draftree.training.early_exit import train_early_exit

    target, tokenizer = where.load(material.model)
    with resumable(material.out) as report:
        recipe = train_early_exit(
            target,
            material.data,
            material.out,
            exit_layer,
            every_layer=every_layer,
            tokenizer=tokenizer,
            options=run,
            report=report,
        )
    if int(os.environ.get("RANK", "0")):  # under accelerate launch the first process speaks for all
        return
    before, after = recipe["agreement"]["before"], recipe["agreement"]["after"]
    report(
        f"{recipe['steps']} steps in {recipe['seconds'] / 60:.1f} min. The exit predicts the answers' next token in "
        f"{after['exit']:.1%} of places ({before['exit']:.1%} before), the whole model in {after['model']:.1%} "
        f"({before['model']:.1%} before). Another model than the one it was made of is in {material.out}."
    )
