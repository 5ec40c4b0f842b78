"""`draftree bench propd`: experiments on early pruning, dynamic trees and merged drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Experiment, Inflate, MaxNewTokens, PerSet, ShowList, WarmPerSet, grouped


@grouped
def propd(
    *,
    experiment: Experiment = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="lookahead, prompt-lookup, bita, hidden-transfer or medusa, once for each.",
            show_default="the experiment's own",
        ),
    ] = None,
    early_head: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of an early head, once for each layer.", show_default="that of the package"),
    ] = None,
    params: Inflate = None,
    per_set: PerSet = 4,
    max_new_tokens: MaxNewTokens = 96,
    nodes: Annotated[int, typer.Option(min=1, help="Guesses a step where trees are static.")] = 32,
    top_k: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of early pruning, once for each.", show_default="1, 2, 4, 8, 16, 50"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts together, once for each.", show_default="1, 2, 4, 8, 16")
    ] = None,
    warm_per_set: WarmPerSet = 8,
    show_list: ShowList = False,
    measuring: Measuring,
) -> None:
    """Early pruning, dynamic trees and merged drafters on the embedded model: experiments after ProPD's tables."""
    from rich.table import Table

    from draftree.bench.propd import EXPERIMENTS, check_drafters, find_experiment, run_experiment
    from draftree.bench.propd_setup import ProPDSettings
    from draftree.cli.screen import StageBar, show_findings, wide_console

    console = wide_console()
    if show_list:
        table = Table("experiment", "what it tells", "of drafters", "in ProPD", title_justify="left")
        for name, about_it in EXPERIMENTS.items():
            table.add_row(name, about_it.says, ", ".join(about_it.drafters), about_it.paper)
        console.print(table)
        return
    find_experiment(experiment)
    check_drafters(drafter or [])
    assert experiment is not None
    default = ProPDSettings()
    settings = ProPDSettings(
        per_set,
        max_new_tokens,
        nodes,
        top_k=tuple(top_k or default.top_k),
        batch=tuple(batch or default.batch),
        warm_per_set=warm_per_set,
    )
    found = measuring.begin()
    folders = [str(folder) for folder in early_head or []]
    with StageBar(console) as bar:
        findings, about = run_experiment(
            experiment, found, settings, drafters=drafter or (), heads=folders, params=params, watcher=bar
        )
    show_findings(console, findings, about, measuring.out, "propd")
