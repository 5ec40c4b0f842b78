"""BiLD's tables and figures (Kim et al., 2023). LOSSY by choice.

A pair that nobody names is the embedded model and its aligned small one; `build_pair` makes an unaligned and an aligned
one by the recipe instead. The early exit is trained on demand, in a copy of the model. Figure 7, the comparison with
CALM, is not repeated: rows that leave the layers in mid-pass need a hook in the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.drafters import bild, bild_engagement, bild_pair
from benchmarks.drafters.bild_ways import Pair
from benchmarks.drafters.early_exit import early_exit_model
from benchmarks.drafters.exit_training import check_exit, train_early_exit
from benchmarks.harness import Setup, on_demand
from draftree.models import load_model
from draftree.runner import inspect_model
from draftree.training.options import TrainOptions


def grid(fallbacks: tuple[float, ...], rollbacks: tuple[float, ...]) -> dict[str, Any]:
    """Return all points of two lists of thresholds, as an option."""
    return {"thresholds": tuple(f"{fallback:g}:{rollback:g}" for fallback in fallbacks for rollback in rollbacks)}


QUICK: dict[str, Any] = {
    **grid((0.3, 0.6, 0.9), (1, 3, 8)),
    **{"windows": (3, 6, 10), "limit": 13, "timed": 13},
    **{"max_new_tokens": 64, "ablations": False, "examples": 1},
}


def early_exit(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiLD on a model and its own first layers, trained to be read by its own head: early exit (LOSSY)."""
    bild.check_options(setup)
    if setup.params is not None:
        raise ValueError("The early exit is trained on the model itself: leave --params out.")
    rows, metric = bild.open_rows(setup)
    layer = setup["exit_layer"] or 1
    large = _trained_exit(setup, layer)
    pair = Pair(large, {f"first {layer} layers": early_exit_model(large, layer)}, exits=True)
    for table in bild.compared(setup, pair, rows, metric):
        table.attrs["remarks"] = [*table.attrs["remarks"], on_demand.remark(setup)]
        yield table


def _trained_exit(setup: Setup, layer: int) -> Any:
    """Return a copy of the model, trained so that its head reads `layer`."""
    check_exit(layer, len(inspect_model(setup.small).layers))

    def make(data: Path, out: Path, options: TrainOptions) -> None:
        given: dict[str, Any] = {"tokenizer": setup.tokenizer, "options": options}
        train_early_exit(setup.small, data, out, layer, **given, report=setup.watcher.say)

    large, _ = load_model(str(on_demand.made(setup, "early-exit", [layer], make)), setup.placement)
    inspect_model(large)
    return large


EXIT: dict[str, Any] = on_demand.OPTIONS | {"exit_layer": 0, "train_reference": ""}
EXIT_GRID = grid((0.2, 0.4, 0.6, 0.8), (0.5, 1, 1.5))  # ranges of section 7.2
SUMMARIES = grid((0.2, 0.4, 0.6), (2, 4, 6))  # of section 7.1.2
_exit = replace(
    bild.EXPERIMENT,
    options={name: v for name, v in bild.OPTIONS.items() if name not in (*bild_pair.OPTIONS, "small", "aligned")}
    | EXIT,
)
EXPERIMENTS = (
    bild.EXPERIMENT.of_paper("BiLD", "Table 1", **QUICK),
    bild_engagement.FIGURE.of_paper("BiLD", "Figure 2", limit=20),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 4", **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 5", **QUICK | {"ablations": True, "windows": tuple(range(3, 11))}),
    replace(_exit, run=early_exit).of_paper("BiLD", "Figure 6", **QUICK | EXIT_GRID),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 8", **QUICK),
    replace(bild.EXPERIMENT, plot=bild.plot_by_rollback).of_paper("BiLD", "Figure 9", **QUICK | SUMMARIES),
)
