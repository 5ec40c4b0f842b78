"""`draftree train skip-set`: what self-speculation leaves out of a model, by a search on recorded answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.options import DataSet, Longest, Model, Runner, check_folder, grouped
from draftree.cli.where import Where
from draftree.training.options import SearchOptions, check_out


@dataclass(frozen=True)
class Search(SearchOptions):
    """Options of a search, as a terminal shows them."""

    max_length: Longest = None


@grouped
def skip_set(
    data: DataSet,
    out: Annotated[Path, typer.Option("--out", help="Folder for the drafter, its recipe and search.json.")],
    *,
    model: Model = None,
    where: Where,
    search: Search,
    runner: Runner = "auto",
) -> None:
    """Attentions and MLPs that SelfSpeculative leaves out, for the best predicted speed."""
    from draftree.cli.screen import StageBar, line_console
    from draftree.training.skip_set import search_skip_set

    check_folder(out)
    check_out(out, "self-speculative", force=search.force)
    target, _ = where.load(model)
    console = line_console()
    with StageBar(console) as bar:
        found = search_skip_set(target, data, out, options=search, runner=runner, watcher=bar)
    settings = found["settings"]
    checked, whole = found["predicted_on_dev"], found["predicted_with_nothing_left_out"]
    lines = [
        f"Left out: attention of {_listed(settings['skip_attention'])}, MLP of {_listed(settings['skip_mlp'])}; "
        f"{found['sets']} sets tried in {found['seconds']} s. Written to {out}.",
        f"On texts kept out the first draft token is right in {checked['agreement']:.1%} of places, and a step "
        f"emits {checked['length']:.2f} tokens for {checked['rows']:.2f} drafted rows: predicted speed "
        f"{checked['speed']:.2f} of plain, the engine's own work not counted "
        f"({whole['speed']:.2f} with nothing left out).",
    ]
    if checked["speed"] <= max(whole["speed"], 1):
        lines.append("Leaving parts out does not pay for this model on this machine.")
    for line in lines:
        console.print(line)


def _listed(layers: list[int]) -> str:
    if not layers:
        return "no layer"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
