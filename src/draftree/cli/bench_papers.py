"""`draftree bench list` and `draftree bench run`: experiments under the names of the papers' tables and figures."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Inflate, grouped


def list_experiments() -> None:
    """Tell the experiments named after the papers' tables and figures that run here."""
    from rich import box
    from rich.table import Table

    from draftree.bench.papers.registry import EXPERIMENTS
    from draftree.cli.screen import wide_console

    table = Table("name", "what it shows", "measured by", "needs", box=box.SIMPLE_HEAD, pad_edge=False)
    before = ""
    for name, entry in EXPERIMENTS.items():
        if before not in ("", entry.paper):
            table.add_section()
        before = entry.paper
        table.add_row(name, entry.says, entry.here, entry.needs)
    console = wide_console()
    console.print(table)
    console.print("draftree bench run NAME prints the paper's figures, with their model and device, beside ours.")


@grouped
def run(
    *,
    name: Annotated[str | None, typer.Argument(help="Which one; draftree bench list tells them.")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafters, as name or name=folder, once for each.", show_default="the experiment's own"),
    ] = None,
    params: Inflate = None,
    per_set: Annotated[int | None, typer.Option(min=1, help="Prompts of every set.", show_default="1")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default="64")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Guesses a step.", show_default="the experiment's own")
    ] = None,
    warm_per_set: Annotated[
        int | None,
        typer.Option(min=0, help="Other prompts of every set, whose answers the trie has seen.", show_default="8"),
    ] = None,
    measuring: Measuring,
) -> None:
    """Run NAME, small unless more is asked for, and print the paper's figures beside ours."""
    from draftree.bench.papers.registry import find_experiment, run_experiment
    from draftree.bench.papers.runs import Asked
    from draftree.cli.screen import StageBar, show_findings, wide_console

    entry = find_experiment(name)
    assert name is not None
    console = wide_console()
    found = measuring.begin()
    with StageBar(console) as bar:
        asked = Asked(found, per_set, max_new_tokens, nodes, warm_per_set, tuple(drafter or ()), params, bar)
        findings, about = run_experiment(name, asked)
    console.print(entry.claim.shown(entry.title))
    console.print("\nOUR FIGURES:", style="italic")
    show_findings(console, findings, about, measuring.out, "run")
