"""`draftree train early-exit`: a copy of a model whose head also reads its first layers."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.train_methods import (
    Accumulate,
    BatchSize,
    Bf16,
    Checkpoints,
    DataSet,
    DevRows,
    Epochs,
    Evaluations,
    Longest,
    Model,
    Out,
    Rate,
    Resume,
    Seed,
    Steps,
    Threads,
)


def early_exit(
    data: DataSet,
    out: Out,
    exit_layer: Annotated[int, typer.Option("--exit-layer", help="n, layers that the exit runs.")],
    model: Model = None,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="Train every layer to be read, for LossyCALM, not this one alone.")
    ] = False,
    epochs: Epochs = 4,
    steps: Steps = None,
    batch: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = None,
    max_length: Longest = None,
    evaluations: Evaluations = 10,
    dev_rows: DevRows = 256,
    checkpoints: Checkpoints = 10,
    seed: Seed = 0,
    bf16: Bf16 = None,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """A copy of the WHOLE model, trained to be read behind layer n (early-exit pairs of BiLD): its texts change."""
    from importlib.util import find_spec

    if find_spec("accelerate") is None:
        raise ValueError("Training needs accelerate: pip install 'draftree[train]'.")
    import torch
    from rich.console import Console

    from draftree.bench.models import load_model
    from draftree.training.early_exit import train_early_exit
    from draftree.training.options import TrainOptions

    if threads is not None:
        torch.set_num_threads(threads)
    options = TrainOptions(
        epochs=epochs,
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        learning_rate=learning_rate,
        max_length=max_length,
        evaluations=evaluations,
        dev_rows=dev_rows,
        checkpoints=checkpoints,
        seed=seed,
        bf16=bf16,
        resume=resume,
    )
    target, tokenizer = load_model(model)
    console = Console(highlight=False, soft_wrap=True)
    recipe = train_early_exit(
        target,
        data,
        out,
        exit_layer,
        every_layer=every_layer,
        tokenizer=tokenizer,
        options=options,
        tell=lambda line: console.print(line, markup=False),
    )
    before, after = recipe["agreement"]["before"], recipe["agreement"]["after"]
    console.print(
        f"{recipe['steps']} steps in {recipe['seconds'] / 60:.1f} min. The exit says the answers' next token in "
        f"{after['exit']:.1%} of places ({before['exit']:.1%} before), the whole model in {after['model']:.1%} "
        f"({before['model']:.1%} before). Another model than the one it was made of is in {out}.",
        markup=False,
    )
