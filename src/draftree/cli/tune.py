"""`draftree tune`: measure drafters and tree sizes on a user's prompts and write the fastest to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.options import (
    MaxNewTokens,
    Prompts,
    RealModel,
    Where,
    check_file,
    check_folder,
    chosen_model,
    grouped,
)


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
    from draftree.tuning.file import write_tuned
    from draftree.tuning.search import tune as measure

    console = wide_console()
    chosen = chosen_model(model)
    # The package's drafters are trained for the embedded model in float32.
    own = chosen is None and where.dtype in ("auto", "float32") and where.quantize is None
    given = drafters if drafters is not None else ["medusa", "hidden-transfer"] if own else []
    loaded, tokenizer = where.load(chosen)
    with StageBar(console) as bar:
        results = measure(loaded, tokenizer, asked, given, minutes=minutes, max_new_tokens=max_new_tokens, watcher=bar)
    best = results[0].candidate
    rows = [
        {
            "candidate": one.candidate.label,
            "prompts": one.prompts,
            "tokens/s": one.tokens_per_second,
            "ratio to plain": one.ratio,
            "acceptance length": one.acceptance_length,
        }
        for one in results
    ]
    console.print(Table("Candidates, the fastest first", rows, list(rows[0])).rich())
    if not best.drafters:
        console.print("Plain decoding is fastest here.", markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tuned(out, loaded, best.drafters, best.node_budget, [one.as_dict() for one in results])
    report_written(console, [out])


def _check(name: str) -> None:
    from draftree.by_name import check_drafter
    from draftree.registry import TRAINED

    if name not in TRAINED and not Path(name).is_dir():
        check_drafter(name)
        reason = "is always measured" if name in ("lookahead", "prompt-lookup") else "is not measured"
        raise ValueError(f"--drafters {name!r} {reason}: name trained drafters or small models, or leave it out.")
