"""The verbs of `draftree bench` that need a checkout: compare, gpu, run, list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftree.cli.bench import read_inputs
from draftree.cli.options import (
    RESULTS,
    Assistant,
    DrafterWarm,
    MaxNewTokens,
    Model,
    PerSet,
    Prompts,
    Results,
    Rounds,
    Threads,
    Where,
    grouped,
    use_threads,
)

OWN = "the experiment's own"
Inflate = Annotated[
    str | None,
    typer.Option(help="Inflate the model to this size, such as 100M (needs a checkout).", show_default="no"),
]
Compiled = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Measure HF with static cache and torch.compile.")
]


@grouped
def compare(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder or hub name, once for each.", show_default="the embedded model"),
    ] = None,
    where: Where,
    params: Inflate = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method, once for each; several drafters joined by + are merged, a folder is a trained drafter.",
            show_default="all",
        ),
    ] = None,
    assistant: Assistant = None,
    per_set: PerSet = 3,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts answered together, once for each.", show_default="1, 4")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Sampling temperature, once for each; 0 is greedy.", show_default="0, 0.8"),
    ] = None,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = True,
    prompts: Prompts = None,
    out: Results = RESULTS,
) -> None:
    """Compare methods on several models, batch sizes and temperatures, interleaved; from a checkout."""
    from benchmarks import compare as comparison
    from benchmarks.harness import kit
    from draftree.cli.screen import StageBar, report_written, wide_console

    names = tuple(dict.fromkeys(method)) if method else kit.METHODS
    for name in names:
        kit.check_name(name)
    where.check()
    found, console = read_inputs(prompts, out), wide_console()
    settings = kit.Settings(per_set, max_new_tokens, rounds, drafter_warm, compiled)
    batches, heats = tuple(dict.fromkeys(batch or (1, 4))), tuple(dict.fromkeys(temperature or (0.0, 0.8)))
    plan = comparison.Plan(settings, names, batches, heats, params, assistant, where.placement)
    models: list[str | None] = [*dict.fromkeys(model)] if model else [None]
    with StageBar(console) as bar:
        cases = comparison.run_compare(models, found, plan, bar)
    for case in cases:
        console.print(case.table().rich())
        console.print(*case.remarks(), sep="\n", markup=False)
    report_written(console, comparison.report_of(cases).write(out))


def list_experiments(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.", show_default=False)] = None,
) -> None:
    """List the experiments of a checkout, or the options of one."""
    from benchmarks.harness import command
    from draftree.cli.screen import wide_console

    wide_console().print(command.listed(name).rich())


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
    prompts: Prompts = None,
    out: Results = RESULTS,
) -> None:
    """Run the experiment NAME of a checkout, and write a JSON file, a picture and a page."""
    from benchmarks.harness import command

    named: dict[str, Any] = {"drafters": drafter, "per_set": per_set, "max_new_tokens": max_new_tokens, "nodes": nodes}
    named |= {"batch": batch, "early_heads": early_head, "warm_per_set": warm_per_set, "depth": depth, "data": data}
    given = command.given_options(settings or [], named)
    own = command.find(name).options  # Some experiments make models of their own.
    placed = {"device": where.device, "dtype": where.dtype}
    given |= {n: v for n, v in placed.items() if v != "auto" and n in own and n not in given}
    where.check()
    _run(name, given, prompts, out, model=model, params=params, placement=where.placement)


def _run(name: str | None, given: dict[str, Any], prompts: Path | None, out: Path, **about: Any) -> None:
    """Run an experiment with the options `given`, print its tables and write its files."""
    from benchmarks.harness import command
    from draftree.cli.screen import StageBar, show_report, wide_console

    experiment = command.find(name)
    experiment.configured(given)
    found, console = read_inputs(prompts, out), wide_console()
    with StageBar(console) as bar:
        report: Any = command.run(experiment, given, **about, prompts=found, watcher=bar, out=out)
    show_report(console, report, out)


@grouped
def gpu(
    *,
    shape: Annotated[str, "Shape of the inflated model."] = "llama-7b",
    dtype: Annotated[str, "bfloat16, float16 or float32."] = "bfloat16",
    device: Annotated[str, "cuda, cuda:1, .."] = "cuda",
    model: Model = None,
    threads: Threads = None,
    per_set: PerSet = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 96,
    compiled: Compiled = True,
    minutes: Annotated[float, typer.Option(min=0, help="Time limit; fewer prompts if it is short.")] = 8,
    prompts: Prompts = None,
    out: Results = RESULTS,
) -> None:
    """Measure a CUDA device against its memory's speed and Hugging Face's decoding; from a checkout."""
    use_threads(threads)
    given: dict[str, Any] = {"shape": shape, "dtype": dtype, "device": device, "per_set": per_set}
    given |= {"max_new_tokens": max_new_tokens, "compiled": compiled, "minutes": minutes}
    _run("gpu", given, prompts, out, model=model)


app = typer.Typer(name="draftree bench")
for verb in (compare, gpu, run):
    app.command(verb.__name__)(verb)
app.command("list")(list_experiments)
