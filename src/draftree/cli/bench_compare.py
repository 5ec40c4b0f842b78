"""`draftree bench compare`: methods against each other, on several models, batch sizes and ways of choosing tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Compiled, DrafterWarm, MaxNewTokens, PerSet, Rounds, TopK, TopP, grouped


@grouped
def compare(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder or hub name; may be given again.", show_default="the embedded model"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="What to measure; may be given again. Drafters joined by + are merged, a folder is a trained drafter.",
            show_default="all",
        ),
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option(help="Small model that drafts, folder or hub name.", show_default="the embedded model's"),
    ] = None,
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
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = True,
    plane: Annotated[int, typer.Option(min=0, help="Prompts of every set for the plane; 0 leaves it out.")] = 1,
    plane_guesses: Annotated[
        int | None, typer.Option(min=1, help="Guesses of every step there.", show_default="8")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew where an unfinished run lies in --out.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="bench-compare.json of another run, to tell whether both agree.")
    ] = None,
    measuring: Measuring,
) -> None:
    """Methods x models x batch sizes x sampling, interleaved by prompt; a stopped run goes on when called again."""
    from draftree.bench.compare import JOURNAL, METHODS, Plan, run_compare
    from draftree.bench.compare_agree import agreement, read_result
    from draftree.bench.compare_case import Settings
    from draftree.bench.compare_files import write_answers, write_csv, write_json, write_markdown
    from draftree.bench.compare_methods import checked_name
    from draftree.bench.compare_page import write_html
    from draftree.bench.methods import Sampling
    from draftree.bench.report import render
    from draftree.cli.screen import StageBar, tell_written, wide_console
    from draftree.models import load_tokenizer

    names = tuple(dict.fromkeys(checked_name(name) for name in method)) if method else METHODS
    heats = temperature or [0.0, 0.8]
    if not any(heats) and (top_k is not None or top_p is not None):
        raise ValueError(
            "--top-k and --top-p shape draws, and every --temperature is 0: give one over 0, or leave them."
        )
    if not plane and plane_guesses is not None:
        raise ValueError("--plane 0 leaves the plane out: leave --plane-guesses out as well.")
    other = None if against is None else read_result(against)
    found, out = measuring.begin(), measuring.out
    if restart:
        shutil.rmtree(out / JOURNAL, ignore_errors=True)
    settings = Settings(per_set, max_new_tokens, rounds, drafter_warm, compiled)
    samplings = tuple(Sampling(heat, top_k, top_p, seed) if heat else None for heat in dict.fromkeys(heats))
    plan = Plan(settings, names, tuple(dict.fromkeys(batch or (1, 4))), samplings, plane, plane_guesses or 8)
    console = wide_console()
    models: list[str | None] = [*dict.fromkeys(model)] if model else [None]
    kept = f"what was measured is kept in {out}, and the same command goes on from there"
    with StageBar(console, kept) as bar:
        comparison = run_compare(models, found, plan, out, bar, assistant=assistant)
    for measured in comparison.models:
        for result in measured.cases:
            console.print(render(result))
    tokenizers = {m.model: load_tokenizer(name) for m, name in zip(comparison.models, models, strict=True)}
    written = [write(comparison, out) for write in (write_json, write_csv, write_markdown, write_html)]
    written.append(write_answers(comparison, tokenizers, out))
    if other is not None:
        for line in agreement(other, read_result(written[0])):
            console.print(line, markup=False)
    tell_written(console, written)
