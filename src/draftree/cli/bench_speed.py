"""`draftree bench speed`: figures of speed beside the wanted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def speed(
    params: Annotated[str, typer.Option(help="Size of the inflated model, about, such as 400M.")] = "400M",
    inflated: Annotated[
        bool, typer.Option("--inflated/--no-inflated", help="Measure an inflated model besides.")
    ] = True,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name.", show_default="the embedded model")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with a 'prompt' each, or a folder of such files.", show_default="those of the package"
        ),
    ] = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set for the small model.")] = 1,
    answers: Annotated[int, typer.Option(min=1, help="How many of them the inflated model answers.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="How often a step of each kind is timed.")] = 3,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the rows of a step.")] = 128,
    drafter_warm: Annotated[int, typer.Option(min=0, help="Prompts of every set that warm the trie.")] = 23,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure HF with static cache and torch.compile.")
    ] = False,
    stages: Annotated[bool, typer.Option("--stages/--no-stages", help="Tell where a step's time goes.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench-speed.json and bench-speed.png.")] = Path("bench-results"),
) -> None:
    """How far the engine is from the machine's limits and from Hugging Face's ways, on a small and a large model."""
    import torch

    from draftree.bench.models import load_model
    from draftree.bench.prompts import embedded_prompts, read_prompts
    from draftree.bench.sizes import parameters_named
    from draftree.bench.speed import SpeedSettings, run_speed
    from draftree.cli.common import StageBar, show_findings, wide_console

    parameters_named(params)
    found = embedded_prompts() if prompts is None else read_prompts(prompts)
    out.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
    settings = SpeedSettings(per_set, answers, max_new_tokens, rounds, context, drafter_warm, compiled, stages)
    console = wide_console()
    loaded, tokenizer = load_model(model)
    with StageBar(console) as bar:
        findings, about = run_speed(
            loaded, tokenizer, found, settings, params=params if inflated else None, name=model, watcher=bar
        )
    show_findings(console, findings, about, out, "speed")
