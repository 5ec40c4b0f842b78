"""`draftree bench`: a quick measurement, and the comparisons and experiments of a checkout.

`quick` is part of the package. The other verbs call `benchmarks/` of a checkout of the repository.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.options import (
    RESULTS,
    Assistant,
    Compiled,
    DrafterWarm,
    Inflate,
    MaxNewTokens,
    Model,
    PerSet,
    Prompts,
    Results,
    Rounds,
    Threads,
    check_folder,
    grouped,
    use_threads,
)
from draftree.cli.where import Where
from draftree.errors import install

if TYPE_CHECKING:
    from draftree.prompts import Prompt

OWN = "the experiment's own"
MARK = "benchmarks/harness/command.py"  # a file that a checkout has and other folders lack


def from_checkout(name: str) -> ModuleType:
    """Import `benchmarks.NAME` of the checkout that the working folder or the package lies in.

    Raises:
        ValueError: there is no checkout, or a package that the benchmarks need is missing.
    """
    starts = (Path.cwd().absolute(), Path(__file__).absolute().parent)
    folders = (folder for start in starts for folder in (start, *start.parents))
    root = next((folder for folder in folders if (folder / MARK).is_file()), None)
    if root is None:
        raise ValueError("This command needs a checkout: clone draftree's repository and call it in that folder.")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("benchmarks", "draftree"):
            raise
        raise ValueError(f"The benchmarks need {error.name}: {install('bench')}.") from error


def read_inputs(prompts: Path | None, out: Path) -> list[Prompt]:
    """Return the prompts and make the output folder; a ValueError for a file or folder that cannot be used."""
    from draftree.prompts import embedded_prompts, read_prompts

    found = embedded_prompts() if prompts is None else read_prompts(prompts)
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    return found


@grouped
def quick(
    *,
    model: Model = None,
    where: Where,
    assistant: Assistant = None,
    per_set: PerSet = 4,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    drafter_warm: DrafterWarm = 23,
    prompts: Prompts = None,
    out: Results = RESULTS,
) -> None:
    """Compare Hugging Face's decoding and draftree's on a model, interleaved: speed, acceptance, equal answers."""
    from draftree.bench.quick import Settings, run_quick
    from draftree.cli.screen import StageBar, show_report, wide_console
    from draftree.drafting.folder import demo_drafter
    from draftree.models import load_model

    where.check()
    found, console = read_inputs(prompts, out), wide_console()
    loaded, tokenizer = load_model(model, where.placement)
    small = None if assistant is None else load_model(assistant, where.placement)[0]
    if model is None and small is None:
        small = demo_drafter("draft-model", loaded).model
    settings = Settings(per_set, max_new_tokens, rounds, drafter_warm)
    with StageBar(console) as bar:
        report = run_quick(loaded, tokenizer, found, settings, name=model, small=small, watcher=bar)
    show_report(console, report, out)


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
    from draftree.cli.screen import StageBar, report_written, wide_console

    comparison, kit = from_checkout("compare"), from_checkout("harness.kit")
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
    prompts: Prompts = None,
    out: Results = RESULTS,
) -> None:
    """Run the experiment NAME of a checkout, and write a JSON file, a picture and a page."""
    command = from_checkout("harness.command")
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
    from draftree.cli.screen import StageBar, show_report, wide_console

    command = from_checkout("harness.command")
    experiment = command.find(name)
    experiment.configured(given)
    found, console = read_inputs(prompts, out), wide_console()
    with StageBar(console) as bar:
        report = command.run(experiment, given, **about, prompts=found, watcher=bar, out=out)
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


app = typer.Typer(name="bench", help="Measure speed, acceptance and cost on this machine.", no_args_is_help=True)
for verb in (quick, compare, gpu, run):
    app.command(verb.__name__)(verb)
app.command("list")(list_experiments)
