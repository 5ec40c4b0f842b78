"""BiLD's tables and figures (Kim et al., 2023). LOSSY by choice.

A pair that nobody names is the embedded model and its aligned small one; `build_pair` makes an unaligned and an aligned
one by the recipe instead. Early exits are trained where no folder is named: a copy of the model with its first layer
for BiLD, and one with every layer for CALM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.drafters import bild, bild_pair
from benchmarks.drafters.bild_ways import BILD, CALM, PLAIN, Pair
from benchmarks.harness import Setup, on_demand
from draftree.drafting.early_exit import early_exit_model
from draftree.models import load_model
from draftree.pruning import LossyCALM
from draftree.runner import inspect_model
from draftree.training.early_exit import exit_weights, train_early_exit
from draftree.training.options import TrainOptions


def grid(fallbacks: tuple[float, ...], rollbacks: tuple[float, ...]) -> dict[str, Any]:
    """All points of two lists of thresholds, as an option."""
    return {"thresholds": tuple(f"{fallback:g}:{rollback:g}" for fallback in fallbacks for rollback in rollbacks)}


QUICK: dict[str, Any] = {
    **grid((0.3, 0.6, 0.9), (1, 3, 8)),
    **{"windows": (3, 6, 10), "limit": 13, "timed": 13},
    **{"max_new_tokens": 64, "ablations": False, "examples": 1},
}


def early_exit(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiLD on a model and its own first layers, trained to be read by its own head: early exit (LOSSY)."""
    yield from _exits(setup, exit_pair)


def against_calm(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiLD's early exit beside CALM, which leaves behind any layer, at every lambda and tau (LOSSY)."""
    for leave, decay in bild.calm_points(setup):
        LossyCALM(leave, decay=decay)  # refuses what is out of range before anything is trained
    yield from _exits(setup, lambda given: exit_pair(given)._replace(calm=_trained_exit(given, every_layer=True)))


def _exits(setup: Setup, open_pair: Callable[[Setup], Pair]) -> Iterator[pd.DataFrame]:
    bild.check_options(setup)
    rows, metric = bild.open_rows(setup)
    for table in bild.compared(setup, open_pair(setup), rows, metric):
        if not setup["drafters"]:
            table.attrs["remarks"] = [*table.attrs["remarks"], on_demand.remark(setup)]
        yield table


def exit_pair(setup: Setup) -> Pair:
    """A model, and its first layers as the small one.

    What `draftree train early-exit` wrote (`--drafter FOLDER`), up to the layer it was trained for; without a folder a
    copy of the model that is trained for it now.

    Raises:
        ValueError: several folders, one that holds no such model, or a layer that the model does not have.
    """
    folders = setup["drafters"]
    if len(folders) > 1:
        raise ValueError("This experiment has one model: name by --drafter one folder of draftree train early-exit.")
    if not folders:
        large, layer = _trained_exit(setup), setup["exit_layer"]
        return Pair(large, {f"first {layer} layers": early_exit_model(large, layer)}, exits=True)
    large, _ = load_model(folders[0], setup.placement)
    try:
        layer = int(json.loads((Path(folders[0]) / "recipe.json").read_text(encoding="utf-8"))["exit_layer"])
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{folders[0]} holds no early exit: give a folder of draftree train early-exit.") from None
    inspect_model(large)
    return Pair(large, {f"first {layer} layers": early_exit_model(large, layer)}, exits=True)


def _trained_exit(setup: Setup, *, every_layer: bool = False) -> Any:
    """A copy of the model, trained so that its head reads the option `exit_layer`, or every layer."""
    layer = setup["exit_layer"]
    if setup.params is not None:
        raise ValueError("Early exits are trained on the model itself: leave --params out.")
    exit_weights(layer, len(inspect_model(setup.small).layers), every_layer=every_layer)

    def make(data: Path, out: Path, options: TrainOptions) -> None:
        given: dict[str, Any] = {"every_layer": every_layer, "tokenizer": setup.tokenizer, "options": options}
        train_early_exit(setup.small, data, out, layer, **given, tell=on_demand.silent)

    name = "calm" if every_layer else "early-exit"
    large, _ = load_model(str(on_demand.made(setup, name, [layer, every_layer], make)), setup.placement)
    inspect_model(large)
    return large


def plot_exits(figure: Any, table: pd.DataFrame) -> None:
    """Quality against latency of BiLD's grid and of CALM's, a curve for each rollback threshold and tau (figure 7)."""
    figure.set_size_inches(7, 4.6)
    axis = figure.add_subplot()
    for group, by, along in ((BILD, "rollback", "fallback"), (CALM, "decay", "leave")):
        for value, own in table[table["group"] == group].sort_values(along).groupby(by):
            line = "-" if group == BILD else "--"
            axis.plot(1 / own["times_plain"], own["quality"], line, marker="o", label=f"{group}, {by} {value:g}")
    axis.axhline(table.loc[table["way"] == PLAIN, "quality"].iloc[0], color="0.5", linestyle=":")
    axis.set_xlabel("time of the large model alone = 1")
    axis.set_ylabel("quality")
    axis.legend(frameon=False, fontsize=7)


EXIT: dict[str, Any] = on_demand.OPTIONS | {"drafters": (), "exit_layer": 1, "train_reference": ""}
EXIT_GRID = grid((0.2, 0.4, 0.6, 0.8), (0.5, 1, 1.5))  # ranges of section 7.2
SUMMARIES = grid((0.2, 0.4, 0.6), (2, 4, 6))  # of section 7.1.2
CALM_GRID: dict[str, Any] = {"leave": (0.7, 0.8, 0.9, 0.98), "decay": (0.0, 1.0, 2.0, 4.0, 8.0)}
_exit = replace(
    bild.EXPERIMENT,
    options={name: v for name, v in bild.OPTIONS.items() if name not in (*bild_pair.OPTIONS, "small", "aligned")}
    | EXIT,
)
EXPERIMENTS = (
    bild.EXPERIMENT.of_paper("BiLD", "Table 1", **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 4", **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 5", **QUICK | {"ablations": True, "windows": tuple(range(3, 11))}),
    replace(_exit, run=early_exit).of_paper("BiLD", "Figure 6", **QUICK | EXIT_GRID),
    replace(_exit, run=against_calm, plot=plot_exits).of_paper("BiLD", "Figure 7", **QUICK | EXIT_GRID, **CALM_GRID),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 8", **QUICK),
    replace(bild.EXPERIMENT, plot=bild.plot_by_rollback).of_paper("BiLD", "Figure 9", **QUICK | SUMMARIES),
)
