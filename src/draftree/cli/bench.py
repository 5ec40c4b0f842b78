"""Declare the verbs that measure: `draftree bench` compares methods, `draftree tune` chooses a drafter for a model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.options import (
    RESULTS,
    Assistant,
    DrafterWarm,
    MaxNewTokens,
    Model,
    PerSet,
    Prompts,
    RealModel,
    Results,
    Rounds,
    Where,
    check_file,
    check_folder,
    chosen_model,
    grouped,
)
from draftree.errors import install

if TYPE_CHECKING:
    from draftree.prompts import Prompt

MARK = "benchmarks/harness/command.py"  # A file that only a checkout has.


def from_checkout(name: str) -> ModuleType:
    """Import `benchmarks.NAME` of the checkout that the working folder or the package lies in."""
    starts = (Path.cwd().absolute(), Path(__file__).absolute().parent)
    folders = (folder for start in starts for folder in (start, *start.parents))
    root = next((folder for folder in folders if (folder / MARK).is_file()), None)
    if root is None:
        raise ValueError("This command needs a checkout: clone draftree's repository and call it in that folder.")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")


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
    per_set: PerSet = 1,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    drafter_warm: DrafterWarm = 4,
    prompts: Prompts = None,
    out: Results = RESULTS,
) -> None:
    """Compare Hugging Face's decoding and draftree's on a model, interleaved: speed, acceptance, equal answers."""
    where.check()
    found = read_inputs(prompts, out)
    from draftree.bench.quick import Settings, run_quick  # Torch is imported after the checks.
    from draftree.cli.screen import StageBar, show_report, wide_console
    from draftree.drafting.folder import demo_drafter
    from draftree.models import load_model

    console = wide_console()
    loaded, tokenizer = load_model(model, where.placement)
    small = None if assistant is None else load_model(assistant, where.placement)[0]
    if model is None and small is None:
        small = demo_drafter("draft-model", loaded).model
    settings = Settings(per_set, max_new_tokens, rounds, drafter_warm)
    with StageBar(console) as bar:
        report = run_quick(loaded, tokenizer, found, settings, name=model, small=small, watcher=bar)
    show_report(console, report, out)


app = typer.Typer(name="bench", help="Measure speed, acceptance and cost on this machine.", no_args_is_help=True)
app.command("quick")(quick)
OF_A_CHECKOUT = {
    "compare": "Compare methods on several models, batch sizes and temperatures, interleaved; needs a checkout.",
    "gpu": "Measure a CUDA device against its memory's speed and Hugging Face's decoding; needs a checkout.",
    "run": "Run an experiment of a checkout; draftree bench run --help shows the options.",
    "list": "List the experiments of a checkout, or the options of one.",
}


def forward(context: typer.Context) -> None:
    """Call the verb of the same name in `benchmarks/cli.py` with all arguments."""
    try:
        from_checkout("cli").app([context.info_name, *context.args], standalone_mode=False)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("benchmarks", "draftree"):
            raise
        raise ValueError(f"The benchmarks need {error.name}: {install('bench')}.") from error


for name, text in OF_A_CHECKOUT.items():
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=text, context_settings=settings, add_help_option=False)(forward)


@grouped
def tune(
    *,
    model: RealModel = None,
    where: Where,
    prompts: Prompts = None,
    column: Annotated[
        str | None, typer.Option(help="Field of a row that holds the prompt.", show_default="turns, prompt or question")
    ] = None,
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure this trained drafter or small model: a folder, or a name of the embedded model's. "
            "May be repeated.",
            show_default="none; for the embedded model medusa and hidden-transfer",
        ),
    ] = None,
    minutes: Annotated[float, "Time limit."] = 5.0,
    max_new_tokens: MaxNewTokens = 96,
    out: Annotated[Path, "File for the choice."] = Path("draftree_tune.json"),
) -> None:
    """Find the fastest drafter and tree size for MODEL on PROMPTS and this machine.

    The choice is written to a file for --drafter.
    """
    from draftree.cli.screen import StageBar, report_written, wide_console
    from draftree.prompts import embedded_prompts, read_prompts

    if out.suffix != ".json":
        raise ValueError(f"--out is {str(out)!r}: name a .json file.")
    if prompts is None and column is not None:
        raise ValueError("--column names a field of the rows of --prompts: add --prompts, or leave --column out.")
    check_folder(out.parent)
    if out.exists():
        check_file(out, "--out", prompts=prompts)
    for name in drafters or ():
        _check(name)
    asked = embedded_prompts() if prompts is None else read_prompts(prompts, column)
    where.check()
    from draftree.bench.report import Table
    from draftree.tuned import write_tuned
    from draftree.tuning.tune import tune as measure

    console = wide_console()
    chosen = chosen_model(model)
    # The package's drafters are trained for the embedded model in float32.
    own = chosen is None and where.dtype in ("auto", "float32") and where.quantize is None
    given = drafters if drafters is not None else ["medusa", "hidden-transfer"] if own else []
    loaded, tokenizer = where.load(chosen)
    with StageBar(console) as bar:
        results = measure(loaded, tokenizer, asked, given, minutes=minutes, max_new_tokens=max_new_tokens, watcher=bar)
    best, left = results[0].candidate, results[-1].rounds < results[0].rounds
    rows = [
        {
            "candidate": one.candidate.label,
            "left": "" if one.rounds == results[0].rounds else f"after round {one.rounds}",
            "prompts": one.prompts,
            "times plain speed": one.ratio,
            "tokens/s": one.tokens_per_second,
            "acceptance length": one.acceptance_length,
        }
        for one in results
    ]
    title = f"Candidates by speed; {results[0].candidate.label} is chosen"
    caption = "Those that left earlier answered fewer prompts: compare tokens/s only within a round." if left else ""
    console.print(Table(title, rows, list(rows[0]), caption).rich())
    if not best.drafters:
        console.print("Plain decoding is fastest here.", markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tuned(out, loaded, best.drafters, best.node_budget, [one.as_dict() for one in results])
    report_written(console, [out])


def _check(name: str) -> None:
    from draftree.by_name import check_drafter
    from draftree.registry import MTP, SHIPPED, TRAINED

    if name not in (*TRAINED, MTP, SHIPPED) and not Path(name).is_dir():
        check_drafter(name)
        reason = "is always measured" if name in ("lookahead", "prompt-lookup") else "is not measured"
        raise ValueError(f"--drafters {name!r} {reason}: name trained drafters or small models, or leave it out.")
