"""`draftree train bita`, `hidden-transfer`, `medusa`, `early-head`: one trainer, one set of options, a few of each."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from draftree.cli.options import grouped
from draftree.cli.train_run import Material, MethodRun
from draftree.cli.where import Where


@grouped
def bita(
    *,
    material: Material,
    where: Where,
    masks: Annotated[int, "M, tokens drafted ahead."] = 3,
    prompts: Annotated[int, "P, prompts that masks alone see; 0 for none."] = 16,
    prompting: Annotated[
        str, "What prompts are: deep (keys and values of each layer), shallow (embeddings), first-layer."
    ] = "deep",
    prefix_dropout: Annotated[float, "Dropout of the prompts."] = 0.1,
    run: MethodRun,
) -> None:
    """Mask embeddings and prompts (BiTA)."""
    settings = {"masks": masks, "prompts": prompts, "prompting": prompting}
    _train("bita", material, where, run, settings, {"prefix_dropout": prefix_dropout})


@grouped
def hidden_transfer(
    *,
    material: Material,
    where: Where,
    layers: Annotated[
        list[int] | None,
        typer.Option("--layer", help="t_i; once for each step.", show_default="those of the paper, scaled"),
    ] = None,
    masked: Annotated[bool, "Pseudo states do not see each other (ablation)."] = False,
    on_pseudo: Annotated[bool, "Train later steps on earlier pseudo states, as inference has them."] = False,
    run: MethodRun,
) -> None:
    """Transfer matrices in mid-stack (Hidden Transfer)."""
    settings = {"transfer_layers": layers or None, "masked": masked}
    _train("hidden-transfer", material, where, run, settings, {"on_pseudo": on_pseudo})


@grouped
def medusa(
    *,
    material: Material,
    where: Where,
    heads: Annotated[int, "Tokens drafted ahead."] = 4,
    layers: Annotated[int, "Residual blocks of a head."] = 1,
    own_head: Annotated[
        bool, typer.Option("--own-head/--shared-head", help="A vocabulary projection for each head, or the model's.")
    ] = False,
    decay: Annotated[float, "Weight of a head's loss relative to the one before."] = 1.0,
    run: MethodRun,
) -> None:
    """Heads on the last hidden state (Medusa, BPD)."""
    settings = {"heads": heads, "layers": layers, "own_head": own_head}
    _train("medusa", material, where, run, settings, {"decay": decay})


@grouped
def early_head(
    *,
    material: Material,
    where: Where,
    layer: Annotated[int, "n, layers that have run."] = 4,
    rank: Annotated[int, "Of the projection; 0 for a full one."] = 0,
    places: Annotated[int, "Tokens predicted, the next one first; pruning needs that alone."] = 1,
    run: MethodRun,
) -> None:
    """A head after an early layer, for pruning (ProPD)."""
    _train("early-head", material, where, run, {"layer": layer, "rank": rank, "places": places}, {})


def _train(
    method: str, material: Material, where: Where, run: MethodRun, settings: dict[str, Any], training: dict[str, Any]
) -> None:
    run.begin(material.out, method)
    import torch

    from draftree.cli.screen import resumable
    from draftree.training.run import train

    target, _ = where.load(material.model)
    with resumable(material.out) as report:
        recipe = train(
            method,
            target,
            material.data,
            material.out,
            settings=settings,
            training=training,
            options=run,
            splits=run.splits,
            dtype=torch.float16 if run.half else None,
            report=report,
        )
    if int(os.environ.get("RANK", "0")):  # under accelerate launch the first process speaks for all
        return
    top = ", ".join(f"{depth} {shares[0]:.1%}" for depth, shares in recipe["accuracy"].items())
    report(
        f"{recipe['parameters']:,} parameters, {recipe['steps']} steps in {recipe['seconds'] / 60:.1f} min; top-1 on "
        f"the dev rows: {top}. Written to {material.out}."
    )
