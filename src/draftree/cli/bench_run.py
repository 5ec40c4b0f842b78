"""`draftree bench list` and `draftree bench run`: the experiments of a checkout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Inflate, Model, grouped
from draftree.cli.where import Where

if TYPE_CHECKING:
    from draftree.placement import Placement


OWN = "the experiment's own"  # the default of what an experiment has a default for


def list_experiments(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.", show_default=False)] = None,
) -> None:
    """List the experiments that this checkout has; or the options of one."""
    from draftree.bench.checkout import from_checkout
    from draftree.cli.screen import wide_console

    wide_console().print(from_checkout("harness.command").listed(name).rich())


@grouped
def run(
    *,
    name: Annotated[str | None, typer.Argument(help="Which one; draftree bench list shows them.")] = None,
    model: Model = None,
    where: Where,
    params: Inflate = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="NAME, FOLDER or NAME=FOLDER, once for each.", show_default=OWN)
    ] = None,
    per_set: Annotated[int | None, typer.Option(min=1, help="Prompts of every set.", show_default=OWN)] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default=OWN)
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="Draft tokens of a step, once for each.", show_default=OWN)
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts together, once for each.", show_default=OWN)
    ] = None,
    early_head: Annotated[
        list[str] | None, typer.Option(help="Folder of a trained early head, once for each.", show_default=OWN)
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Most tokens that a drafter looks ahead.", show_default=OWN)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Rows to answer (JSON lines), where references are needed.", show_default=OWN)
    ] = None,
    warm_per_set: Annotated[
        int | None,
        typer.Option(min=0, help="Other prompts of every set, whose answers the trie has seen.", show_default=OWN),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of another option; several values between commas.", show_default="none"),
    ] = None,
    measuring: Measuring,
) -> None:
    """Run the experiment NAME: its table, and a JSON file, a picture and a page of it."""
    from draftree.bench.checkout import from_checkout

    named: dict[str, Any] = {"drafters": drafter, "per_set": per_set, "max_new_tokens": max_new_tokens, "nodes": nodes}
    named |= {"batch": batch, "early_heads": early_head, "warm_per_set": warm_per_set, "depth": depth, "data": data}
    command = from_checkout("harness.command")
    given = command.given_options(settings or [], named)
    own = command.find(name).options  # some experiments make models of their own
    placed = {"device": where.device, "dtype": where.dtype}
    given |= {n: v for n, v in placed.items() if v != "auto" and n in own and n not in given}
    where.check()
    run_experiment(name, given, measuring, model, params, where.placement)


def run_experiment(
    name: str | None,
    given: dict[str, Any],
    measuring: Measuring,
    model: str | None,
    params: str | None = None,
    placement: Placement | None = None,
) -> None:
    """Run an experiment with the options `given`, print its tables and write its files.

    Raises:
        ValueError: there is no checkout; an option, model or drafter that does not fit, before any work.
    """
    from draftree.bench.checkout import from_checkout
    from draftree.cli.screen import StageBar, show_report, wide_console

    command = from_checkout("harness.command")
    experiment = command.find(name)
    experiment.configured(given)
    prompts, console = measuring.begin(), wide_console()
    kept = f"parts that were complete, if there were any, are in {command.partial_file(experiment, measuring.out)}"
    with StageBar(console, kept) as bar:
        about = {"model": model, "params": params, "placement": placement}
        report = command.run(experiment, given, **about, prompts=prompts, watcher=bar, out=measuring.out)
    show_report(console, report, measuring.out)
