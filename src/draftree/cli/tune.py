"""`draftree tune`: find the drafter, trie and trees that are fastest for a model, a text and this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from draftree.cli.options import MaxNewTokens, Model, Prompts, check_file, check_folder, grouped
from draftree.cli.where import Where


@grouped
def tune(
    *,
    model: Model = None,
    where: Where,
    prompts: Prompts = None,
    column: Annotated[
        str | None, typer.Option(help="Which entry of a row is the prompt.", show_default="turns, prompt or question")
    ] = None,
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            help="Trained drafter or small model to try as well: a folder, or a name of the embedded model's; may be "
            "given again.",
            show_default="none; for the embedded model medusa and hidden-transfer",
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Time for all of it.", show_default="5.0")] = None,
    max_new_tokens: MaxNewTokens = 96,
    per_set: Annotated[int, typer.Option(min=1, help="Most prompts of every set.")] = 40,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the choice; its trie goes next to it.", show_default="draftree_tune.json"),
    ] = None,
    check: Annotated[bool, "Only compare what replay predicts with real runs; writes nothing."] = False,
) -> None:
    """Find what is fastest for MODEL on PROMPTS and this machine; write it to a file that --drafter takes."""
    from draftree.cli.screen import StageBar, report_written, wide_console
    from draftree.prompts import embedded_prompts, read_prompts
    from draftree.tuning.check import check_replay
    from draftree.tuning.prepare import TuningOptions
    from draftree.tuning.report import render, table_of, why, write_choice
    from draftree.tuning.search import tune as find

    for name, given in (("--minutes", minutes), ("--out", out)):
        if check and given is not None:
            raise ValueError(f"--check answers all prompts and writes nothing: leave {name} out.")
    out = out or Path("draftree_tune.json")
    if out.suffix != ".json":
        raise ValueError(f"--out is {str(out)!r}: name a .json file.")
    if prompts is None and column is not None:
        raise ValueError("--column names an entry of the rows of --prompts: add --prompts, or leave --column out.")
    check_folder(out.parent)
    for name, path in (("--out", out), ("The trie of --out", out.with_suffix(".trie"))):
        if path.exists():
            check_file(path, name, prompts=prompts)
    found = embedded_prompts() if prompts is None else read_prompts(prompts, column)
    # Whether it is the model that the package's drafters were trained for.
    own = model is None and where.dtype in ("auto", "float32") and where.quantize is None
    named = drafters if drafters is not None else ["medusa", "hidden-transfer"] if own else []
    specs = tuple(_spec(name) for name in dict.fromkeys(named))
    options = TuningOptions(5.0 if minutes is None else minutes, max_new_tokens, per_set, specs)
    console = wide_console()
    if any(prompt.later for prompt in found):
        console.print("Of rows with several turns the first is answered.", markup=False)
    loaded, tokenizer = where.load(model)
    if check:
        with StageBar(console) as bar:
            rows = check_replay(loaded, tokenizer, found, options, bar)
        console.print(table_of(rows, "Replay against real runs").rich())
        return
    with StageBar(console) as bar:
        choice = find(loaded, tokenizer, found, options, bar)
    console.print(render(choice))
    for line in why(choice):
        console.print(line, markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    report_written(console, write_choice(choice, loaded, tokenizer, out))


def _spec(name: str) -> Any:
    """What --drafters names: a folder that training wrote, one of a small model, or one of the embedded model's own."""
    from draftree.by_name import check_drafter
    from draftree.drafting.folder import SMALL, is_small_model
    from draftree.registry import TRAINED
    from draftree.tuning.file import Spec

    folder = Path(name).is_dir()
    if name not in TRAINED and not folder:
        check_drafter(name)
        reason = "is always tried" if name in ("lookahead", "prompt-lookup") else "is nothing that tuning tries"
        raise ValueError(f"--drafters {name!r} {reason}: name trained drafters or small models, or leave it out.")
    small = is_small_model(Path(name)) if folder else name == SMALL
    return Spec(SMALL if small else "trained", name=os.path.join(".", name) if folder else name)
