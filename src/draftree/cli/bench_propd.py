"""`draftree bench propd`: experiments on early pruning, dynamic trees and merged drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def propd(
    experiment: Annotated[str | None, typer.Argument(help="Which one; --list tells them.", show_default=False)] = None,
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
    params: Annotated[
        str | None,
        typer.Option(help="Inflate the embedded model to about so many parameters, as 100M.", show_default="no"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with a 'prompt' each, or a folder of such files.", show_default="those of the package"
        ),
    ] = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set to measure on.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 96,
    nodes: Annotated[int, typer.Option(min=1, help="Guesses a step where trees are static.")] = 32,
    top_k: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of early pruning, once for each.", show_default="1, 2, 4, 8, 16, 50"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts together, once for each.", show_default="1, 2, 4, 8, 16")
    ] = None,
    warm_per_set: Annotated[
        int, typer.Option(min=0, help="Other prompts of every set, whose answers the trie has seen.")
    ] = 8,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = Path("bench-results"),
    show_list: Annotated[bool, typer.Option("--list", help="Tell the experiments, and do nothing else.")] = False,
) -> None:
    """Early pruning, dynamic trees and merged drafters on the embedded model: experiments after ProPD's tables."""
    import torch
    from rich.table import Table

    from draftree.bench.prompts import embedded_prompts, read_prompts
    from draftree.bench.propd import EXPERIMENTS, check_drafters, find_experiment, run_experiment
    from draftree.bench.propd_setup import ProPDSettings
    from draftree.cli.common import StageBar, show_findings, wide_console

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
    found = embedded_prompts() if prompts is None else read_prompts(prompts)
    out.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
    folders = [str(folder) for folder in early_head or []]
    with StageBar(console) as bar:
        findings, about = run_experiment(
            experiment, found, settings, drafters=drafter or (), heads=folders, params=params, watcher=bar
        )
    show_findings(console, findings, about, out, "propd")
