"""`draftree bench compare`: methods against each other, on several models, batch sizes and ways of choosing tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.bench.names import LABELS, METHODS, check_name
from draftree.cli.measuring import Measuring
from draftree.cli.options import (
    Assistant,
    Compiled,
    DrafterWarm,
    Inflate,
    MaxNewTokens,
    PerSet,
    Rounds,
    TopK,
    TopP,
    grouped,
)
from draftree.cli.where import Where


@grouped
def compare(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder or hub name; may be given again.", show_default="the embedded model"),
    ] = None,
    where: Where,
    params: Inflate = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to measure, once for each: {', '.join(LABELS)}, drafters joined by +, which are merged, or "
            "the folder of a trained drafter.",
            show_default="all",
        ),
    ] = None,
    assistant: Assistant = None,
    per_set: PerSet = 3,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts answered together.", show_default="1, 4")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Tokens are drawn at this temperature; 0 takes the best.", show_default="0, 0.8"),
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int, "Of the draws."] = 0,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = True,
    restart: Annotated[bool, "Begin anew where an unfinished run lies in --out."] = False,
    against: Annotated[Path | None, "bench-compare.json of another run: say whether both agree; in a checkout."] = None,
    measuring: Measuring,
) -> None:
    """Methods x models x batch sizes x sampling, interleaved by prompt; a stopped run goes on when called again."""
    from draftree.bench.case_report import case_report
    from draftree.bench.checkout import from_checkout
    from draftree.bench.compare import Plan, discard_unfinished, run_compare
    from draftree.bench.files import write_all
    from draftree.bench.inputs import Settings
    from draftree.bench.samples import samplings_of
    from draftree.cli.screen import StageBar, report_written, wide_console

    names = tuple(dict.fromkeys(method)) if method else METHODS
    for name in names:
        check_name(name)
    samplings = samplings_of(temperature or [0.0, 0.8], top_k, top_p, seed)
    judge = None if against is None else from_checkout("agree")
    other = None if judge is None else judge.read_result(against)
    where.check()
    prompts, console, out = measuring.begin(), wide_console(), measuring.out
    if restart:
        discard_unfinished(out)
    settings = Settings(per_set, max_new_tokens, rounds, drafter_warm, compiled)
    plan = Plan(settings, names, tuple(dict.fromkeys(batch or (1, 4))), samplings, params, assistant, where.placement)
    models: list[str | None] = [*dict.fromkeys(model)] if model else [None]
    kept = f"what was measured is kept in {out}, and the same command goes on from there"
    with StageBar(console, kept) as bar:
        comparison = run_compare(models, prompts, plan, out, bar)
    reports = [case_report("compare", result) for result in comparison.cases]
    for part in (part for report in reports for part in report.printed()):
        console.print(part)
    written = write_all(comparison, reports, out)
    for line in [] if judge is None else judge.agreement(other, judge.read_result(written[0])):
        console.print(line, markup=False)
    report_written(console, written)
