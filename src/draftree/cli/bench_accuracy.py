"""`draftree bench accuracy`: experiments on trained drafters."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Experiment, Inflate, MaxNewTokens, Model, PerSet, ShowList, grouped


@grouped
def accuracy(
    *,
    experiment: Experiment = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="name=folder of a trained drafter, or a method's word for the package's; once for each.",
            show_default="those of the package",
        ),
    ] = None,
    model: Model = None,
    per_set: PerSet = 4,
    max_new_tokens: MaxNewTokens = 96,
    nodes: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Guesses a step, once for each budget.", show_default="4, 8, 16, 32; of wall-clock 1, 2, 4, 8"
        ),
    ] = None,
    tree: Annotated[
        list[str] | None, typer.Option(help="Kind of tree, once for each.", show_default="all of them")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Guess at most so many tokens ahead.", show_default="all they can")
    ] = None,
    params: Inflate = None,
    search_per_set: Annotated[
        int, typer.Option(min=1, help="Other prompts of every set, on which choice lists are searched.")
    ] = 4,
    show_list: ShowList = False,
    measuring: Measuring,
) -> None:
    """What trained drafters guess right, and how far their trees are walked: experiments named after the papers."""
    from rich.table import Table

    from draftree.bench.accuracy import (
        EXPERIMENTS,
        find_experiment,
        inflated,
        load_subjects,
        named_folders,
        run_experiment,
    )
    from draftree.bench.analysis_setup import AccuracySettings
    from draftree.bench.analysis_trees import checked_kinds
    from draftree.cli.screen import StageBar, show_findings, wide_console
    from draftree.models import load_model

    console = wide_console()
    if show_list:
        table = Table("experiment", "what it tells", "of drafters", "in the papers", title_justify="left")
        for name, about_it in EXPERIMENTS.items():
            table.add_row(name, about_it.says, ", ".join(about_it.methods), about_it.paper)
        console.print(table)
        return
    budgets = tuple(nodes or find_experiment(experiment).budgets)
    assert experiment is not None
    folders = named_folders(drafter or [], experiment, model)
    settings = AccuracySettings(per_set, max_new_tokens, budgets, checked_kinds(tree or []), search_per_set)
    found = measuring.begin()
    loaded, tokenizer = load_model(model)
    subjects = load_subjects(folders, experiment, loaded, depth)
    if params is not None:
        loaded, subjects = inflated(loaded, subjects, params)
        model = f"{model or 'the embedded model'} inflated to {params}"
    with StageBar(console) as bar:
        findings, about = run_experiment(
            experiment, loaded, tokenizer, subjects, found, settings, name=model, watcher=bar
        )
    show_findings(console, findings, about, measuring.out, "accuracy")
