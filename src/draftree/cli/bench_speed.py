"""`draftree bench speed`: figures of speed, against the machine's limits and Hugging Face."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Compiled, DrafterWarm, Inflate, Model, PerSet, RequestState, StepRounds, grouped
from draftree.cli.where import Where


@grouped
def speed(
    *,
    model: Model = None,
    where: Where,
    params: Inflate = None,
    per_set: PerSet = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 48,
    rounds: StepRounds = 7,
    context: RequestState = 128,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = False,
    measuring: Measuring,
) -> None:
    """How far the engine is from the machine's limits and from Hugging Face's ways of decoding."""
    from draftree.bench.inputs import Settings, Subject
    from draftree.bench.speed import run_speed
    from draftree.cli.screen import StageBar, show_report, wide_console

    where.check()
    prompts, console = measuring.begin(), wide_console()
    settings = Settings(per_set, max_new_tokens, 1, drafter_warm, compiled)
    subject = Subject.load(model, where.placement)
    with StageBar(console) as bar:
        report = run_speed(subject, prompts, settings, params=params, rounds=rounds, context=context, watcher=bar)
    show_report(console, report, measuring.out)
