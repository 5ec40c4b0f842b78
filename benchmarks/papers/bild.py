"""BiLD's tables and figures (Kim et al., 2023). LOSSY by choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.drafters import bild
from benchmarks.harness import Setup
from draftree.drafting.early_exit import early_exit_model
from draftree.models import load_model
from draftree.runner import inspect_model

GRID = tuple(f"{fallback}:{rollback}" for fallback in (0.3, 0.6, 0.9) for rollback in (1, 3, 8))
QUICK: dict[str, Any] = {
    **{"thresholds": GRID, "windows": (3, 6, 10), "metric": "rouge-l", "limit": 13, "timed": 13},
    **{"max_new_tokens": 64, "ablations": False, "examples": 1},
}


def early_exit(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiLD on a model and its own first layers, read by its own head: early exit (LOSSY)."""
    pair = exit_pair(setup)
    yield from bild.compared(setup, pair, bild.open_rows(setup), setup["metric"])


def exit_pair(setup: Setup) -> bild.Pair:
    """A model, and its first layers as the small one.

    What `draftree train early-exit` wrote (`--drafter FOLDER`), up to the layer it was trained for; without a folder
    the model up to its middle, which nobody trained to be read there.

    Raises:
        ValueError: several folders, or one that holds no such model.
    """
    folders = setup["drafters"]
    if not folders:
        layer = len(setup.target.layers) // 2
        return bild.Pair(
            setup.model, {f"first {layer} layers, not trained for it": early_exit_model(setup.model, layer)}
        )
    if len(folders) > 1:
        raise ValueError("This experiment has one model: name by --drafter one folder of draftree train early-exit.")
    large, _ = load_model(folders[0])
    try:
        layer = int(json.loads((Path(folders[0]) / "recipe.json").read_text(encoding="utf-8"))["exit_layer"])
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{folders[0]} holds no early exit: give a folder of draftree train early-exit.") from None
    inspect_model(large)
    return bild.Pair(large, {f"first {layer} layers": early_exit_model(large, layer)})


EXPERIMENTS = (
    bild.EXPERIMENT.of_paper("BiLD", "Table 1", **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 4", **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 5", **QUICK | {"ablations": True, "windows": tuple(range(3, 11))}),
    replace(bild.EXPERIMENT, run=early_exit).of_paper("BiLD", "Figure 6", **QUICK, drafters=()),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 8", **QUICK),
    replace(bild.EXPERIMENT, plot=bild.plot_by_rollback).of_paper("BiLD", "Figure 9", **QUICK),
)
