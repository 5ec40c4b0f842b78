"""`draftree bench speed`: figures of speed next to their targets."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Compiled, Context, DrafterWarm, Model, StepRounds, grouped


@grouped
def speed(
    *,
    params: Annotated[str, typer.Option(help="Size of the inflated model, about, such as 400M.")] = "400M",
    inflated: Annotated[bool, typer.Option("--inflated/--no-inflated", help="Also measure an inflated model.")] = True,
    model: Model = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set for the small model.")] = 1,
    answers: Annotated[int, typer.Option(min=1, help="How many of them the inflated model answers.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 48,
    rounds: StepRounds = 3,
    context: Context = 128,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = False,
    measuring: Measuring,
) -> None:
    """How far the engine is from the machine's limits and from Hugging Face's ways, on a small and a large model."""
    from draftree.bench.inputs import Settings, Subject
    from draftree.bench.speed import SpeedSettings, run_speed
    from draftree.cli.screen import StageBar, show_report, wide_console

    prompts, console = measuring.begin(), wide_console()
    settings = SpeedSettings(
        Settings(per_set, max_new_tokens, 1, drafter_warm, compiled), rounds, context, inflated_answers=answers
    )
    subject = Subject.load(model)
    with StageBar(console) as bar:
        report = run_speed(subject, prompts, settings, params=params if inflated else None, watcher=bar)
    show_report(console, report, measuring.out)
