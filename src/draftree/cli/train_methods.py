"""`draftree train bita`, `hidden-transfer`, `medusa`, `early-head`: one trainer, one set of options, a few of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[str | None, typer.Option("--model", help="Folder or hub name.", show_default="the embedded model")]
DataSet = Annotated[Path, typer.Option("--data", help="Data set that draftree train data made with this model.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the drafter, its recipe, curve and checkpoints.")]
Epochs = Annotated[float, typer.Option("--epochs", help="Passes over the data.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Optimizer steps, instead of epochs.", show_default=False)]
BatchSize = Annotated[int, typer.Option("--batch", help="Rows of a pass, on each device.")]
Accumulate = Annotated[int, typer.Option("--accumulate", help="Passes of an optimizer step.")]
Rate = Annotated[float | None, typer.Option("--learning-rate", help="At its top.", show_default="the method's own")]
Splits = Annotated[
    int | None, typer.Option("--splits", help="Split points of a row and pass; 0 for all.", show_default="the method's")
]
Longest = Annotated[int | None, typer.Option("--max-length", help="Leave out rows with more tokens.")]
Evaluations = Annotated[int, typer.Option("--evaluations", help="How often the dev rows are scored.")]
DevRows = Annotated[int, typer.Option("--dev-rows", help="Most dev rows to score.")]
Checkpoints = Annotated[int, typer.Option("--checkpoints", help="How many are written over the run.")]
Seed = Annotated[int, typer.Option("--seed", help="Of everything drawn.")]
Bf16 = Annotated[
    bool | None, typer.Option("--bf16/--fp32", help="Mixed precision.", show_default="where the device has it")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")]
Half = Annotated[bool, typer.Option("--half", help="Store the weights in fp16.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.", show_default="torch's choice")]


def bita(
    data: DataSet,
    out: Out,
    model: Model = None,
    masks: Annotated[int, typer.Option(help="M, tokens guessed ahead.")] = 3,
    prompts: Annotated[int, typer.Option(help="P, prompt keys and values of a layer; 0 for none.")] = 16,
    deep: Annotated[bool, typer.Option("--deep/--shallow", help="Prompts in every layer, or in the first.")] = True,
    prefix_dropout: Annotated[float, typer.Option(help="Dropout of the prompts.")] = 0.1,
    epochs: Epochs = 4,
    steps: Steps = None,
    batch: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = None,
    splits: Splits = None,
    max_length: Longest = None,
    evaluations: Evaluations = 10,
    dev_rows: DevRows = 256,
    checkpoints: Checkpoints = 10,
    seed: Seed = 0,
    bf16: Bf16 = None,
    resume: Resume = False,
    half: Half = False,
    threads: Threads = None,
) -> None:
    """Mask embeddings and prompts (BiTA)."""
    settings = {"masks": masks, "prompts": prompts, "deep": deep}
    _train("bita", dict(locals()), settings, {"prefix_dropout": prefix_dropout})


def hidden_transfer(
    data: DataSet,
    out: Out,
    model: Model = None,
    layers: Annotated[
        list[int] | None, typer.Option("--layer", help="t_i; once for each step.", show_default="from the middle on")
    ] = None,
    masked: Annotated[bool, typer.Option("--masked", help="Pseudo states do not see each other (ablation).")] = False,
    on_pseudo: Annotated[
        bool, typer.Option("--on-pseudo", help="Train later steps on earlier pseudo states, as inference has them.")
    ] = False,
    epochs: Epochs = 4,
    steps: Steps = None,
    batch: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = None,
    splits: Splits = None,
    max_length: Longest = None,
    evaluations: Evaluations = 10,
    dev_rows: DevRows = 256,
    checkpoints: Checkpoints = 10,
    seed: Seed = 0,
    bf16: Bf16 = None,
    resume: Resume = False,
    half: Half = False,
    threads: Threads = None,
) -> None:
    """Transfer matrices in mid-stack (Hidden Transfer)."""
    settings = {"transfer_layers": layers or None, "masked": masked}
    _train("hidden-transfer", dict(locals()), settings, {"on_pseudo": on_pseudo})


def medusa(
    data: DataSet,
    out: Out,
    model: Model = None,
    heads: Annotated[int, typer.Option(help="Tokens guessed ahead.")] = 4,
    layers: Annotated[int, typer.Option(help="Residual blocks of a head.")] = 1,
    own_head: Annotated[
        bool, typer.Option("--own-head/--shared-head", help="A vocabulary projection for each head, or the model's.")
    ] = False,
    decay: Annotated[float, typer.Option(help="Weight of a head's loss relative to the one before.")] = 1.0,
    epochs: Epochs = 4,
    steps: Steps = None,
    batch: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = None,
    splits: Splits = None,
    max_length: Longest = None,
    evaluations: Evaluations = 10,
    dev_rows: DevRows = 256,
    checkpoints: Checkpoints = 10,
    seed: Seed = 0,
    bf16: Bf16 = None,
    resume: Resume = False,
    half: Half = False,
    threads: Threads = None,
) -> None:
    """Heads on the last hidden state (Medusa, BPD)."""
    settings = {"heads": heads, "layers": layers, "own_head": own_head}
    _train("medusa", dict(locals()), settings, {"decay": decay})


def early_head(
    data: DataSet,
    out: Out,
    model: Model = None,
    layer: Annotated[int, typer.Option(help="n, layers that have run.")] = 4,
    rank: Annotated[int, typer.Option(help="Of the projection; 0 for a full one.")] = 0,
    epochs: Epochs = 4,
    steps: Steps = None,
    batch: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = None,
    splits: Splits = None,
    max_length: Longest = None,
    evaluations: Evaluations = 10,
    dev_rows: DevRows = 256,
    checkpoints: Checkpoints = 10,
    seed: Seed = 0,
    bf16: Bf16 = None,
    resume: Resume = False,
    half: Half = False,
    threads: Threads = None,
) -> None:
    """A head after an early layer, for pruning (ProPD)."""
    _train("early-head", dict(locals()), {"layer": layer, "rank": rank}, {})


def _train(method: str, given: dict[str, Any], settings: dict[str, Any], training: dict[str, Any]) -> None:
    from importlib.util import find_spec

    if find_spec("accelerate") is None:
        raise ValueError("Training needs accelerate: pip install 'draftree[train]'.")
    import dataclasses

    import torch
    from rich.console import Console

    from draftree.bench.models import load_model
    from draftree.training.options import TrainOptions
    from draftree.training.run import train

    names = {field.name for field in dataclasses.fields(TrainOptions)}
    options = TrainOptions(**{name: value for name, value in given.items() if name in names})
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    target, _ = load_model(given["model"])
    console = Console(highlight=False, soft_wrap=True)
    recipe = train(
        method,
        target,
        given["data"],
        given["out"],
        settings=settings,
        training=training,
        options=options,
        dtype=torch.float16 if given["half"] else None,
        tell=lambda line: console.print(line, markup=False),
    )
    if int(os.environ.get("RANK", "0")):  # under accelerate launch the first process speaks for all
        return
    top = ", ".join(f"{depth} {shares[0]:.1%}" for depth, shares in recipe["accuracy"].items())
    console.print(
        f"{recipe['parameters']:,} parameters, {recipe['steps']} steps in {recipe['seconds'] / 60:.1f} min; top-1 on "
        f"the dev rows: {top}. Written to {given['out']}.",
        markup=False,
    )
