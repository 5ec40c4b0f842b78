"""BiLD's tables and figures (Kim et al., 2023). LOSSY by choice.

A pair that nobody names is the embedded model and its aligned small one; `build_pair` makes an unaligned and an aligned
one by the recipe instead. Early exits are trained where no folder is named: a copy of the model with its first layer
for BiLD, and one with every layer for CALM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.drafters import bild, bild_pair
from benchmarks.drafters.bild_ways import BILD, CALM, Pair
from benchmarks.harness import Setup, on_demand
from draftree.drafting.early_exit import early_exit_model
from draftree.models import load_model
from draftree.pruning import LossyCALM
from draftree.runner import inspect_model
from draftree.training.early_exit import exit_weights, train_early_exit
from draftree.training.options import RECIPE, TrainOptions


def grid(fallbacks: tuple[float, ...], rollbacks: tuple[float, ...]) -> dict[str, Any]:
    """All points of two lists of thresholds, as an option."""
    return {"thresholds": tuple(f"{fallback:g}:{rollback:g}" for fallback in fallbacks for rollback in rollbacks)}


QUICK: dict[str, Any] = {
    **grid((0.3, 0.6, 0.9), (1, 3, 8)),
    **{"windows": (3, 6, 10), "limit": 13, "timed": 13},
    **{"max_new_tokens": 64, "ablations": False, "examples": 1},
}


ONE = (
    "This experiment has one model: name by --drafter one folder of draftree train early-exit, trained without "
    "--every-layer, or none."
)
TWO = (
    "This experiment compares an early exit with CALM: name by --drafter two folders of draftree train early-exit, the "
    "second one trained with --every-layer, or none."
)


def early_exit(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiLD on a model and its own first layers, trained to be read by its own head: early exit (LOSSY)."""
    yield from _exits(setup, with_calm=False)


def against_calm(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiLD's early exit beside CALM, which leaves behind any layer, at every lambda and tau (LOSSY)."""
    for leave, decay in product(setup["leave"], setup["decay"]):
        LossyCALM(leave, decay=decay)  # refuses what is out of range before anything is trained
    yield from _exits(setup, with_calm=True)


def _exits(setup: Setup, *, with_calm: bool) -> Iterator[pd.DataFrame]:
    bild.check_options(setup)
    if setup.params is not None:
        raise ValueError("Early exits are trained on the model itself: leave --params out.")
    folders = exit_folders(setup, with_calm=with_calm) if setup["drafters"] else []
    setup = replace(setup, name=folders[0]) if folders else setup  # its tokenizer and its prompts' template
    rows, metric = bild.open_rows(setup)
    layer = _recipe(folders[0])["exit_layer"] if folders else setup["exit_layer"] or 1
    large = setup.model if folders else _trained_exit(setup, layer)
    pair = Pair(large, {f"first {layer} layers": early_exit_model(large, layer)}, exits=True)
    if with_calm:
        calm = _opened(folders[1], setup) if folders else _trained_exit(setup, layer, every_layer=True)
        pair = pair._replace(calm=calm)
    for table in bild.compared(setup, pair, rows, metric):
        said = f"The model is that of {Path(folders[0]).name}." if folders else on_demand.remark(setup)
        table.attrs["remarks"] = [*table.attrs["remarks"], said]
        yield table


def exit_folders(setup: Setup, *, with_calm: bool) -> list[str]:
    """The folders that `--drafter` names: of `draftree train early-exit`, and CALM's, of the same with --every-layer.

    Raises:
        ValueError: others than these, of two models, or a model that is named beside them.
    """
    folders, said = [str(folder) for folder in setup["drafters"]], TWO if with_calm else ONE
    expected = [False, True] if with_calm else [False]
    if len(folders) != len(expected):
        raise ValueError(said)
    recipes = [_recipe(folder) for folder in folders]
    if [recipe["every_layer"] for recipe in recipes] != expected:
        raise ValueError(said)
    if len({recipe["base"] for recipe in recipes}) > 1:
        raise ValueError(f"{' and '.join(folders)} were trained from two models: name folders of one.")
    if setup.name is not None:
        raise ValueError("A folder of draftree train early-exit holds the model: leave --model out.")
    if setup.options.get("exit_layer") not in (None, 0, recipes[0]["exit_layer"]):
        raise ValueError(f"{folders[0]} is read behind layer {recipes[0]['exit_layer']}: leave exit_layer out.")
    return folders


def _recipe(folder: str) -> dict[str, Any]:
    """What a folder of `draftree train early-exit` says of itself."""
    try:
        held: dict[str, Any] = json.loads((Path(folder) / RECIPE).read_text(encoding="utf-8"))
        known = {"exit_layer": int(held["exit_layer"]), "every_layer": bool(held["every_layer"])}
        return known | {"base": str(held["base_model"]["hash"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} holds no early exit: give a folder of draftree train early-exit.") from None


def _trained_exit(setup: Setup, layer: int, *, every_layer: bool = False) -> Any:
    """A copy of the model, trained so that its head reads `layer`, or every layer."""
    exit_weights(layer, len(inspect_model(setup.small).layers), every_layer=every_layer)

    def make(data: Path, out: Path, options: TrainOptions) -> None:
        given: dict[str, Any] = {"every_layer": every_layer, "tokenizer": setup.tokenizer, "options": options}
        train_early_exit(setup.small, data, out, layer, **given, report=on_demand.silent)

    name = "calm" if every_layer else "early-exit"
    return _opened(str(on_demand.made(setup, name, [layer, every_layer], make)), setup)


def _opened(folder: str, setup: Setup) -> Any:
    large, _ = load_model(folder, setup.placement)
    inspect_model(large)
    return large


def plot_exits(figure: Any, table: pd.DataFrame) -> None:
    """Quality against latency of BiLD's grid and of CALM's, a curve for each rollback threshold and tau (figure 7)."""
    figure.set_size_inches(7, 4.6)
    curves = {BILD: ("rollback", "fallback"), CALM: ("decay", "leave")}
    bild.draw_curves(figure.add_subplot(), table, "", curves)


EXIT: dict[str, Any] = on_demand.OPTIONS | {"drafters": (), "exit_layer": 0, "train_reference": ""}
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
