"""BiLD's tables and figures (Kim et al., 2023). LOSSY by choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.drafters import bild
from benchmarks.harness import Claim, Setup
from draftree.drafting.early_exit import early_exit_model
from draftree.models import load_model
from draftree.runner import inspect_model

PAIRS, T4 = "mT5-large with mT5-small (translation), T5-large with T5-small (summaries)", "one T4, batch 1"
OVER = "speed over the large model alone"

BEST = Claim(
    PAIRS,
    T4,
    f"BLEU or ROUGE-L, and {OVER}",
    ("way", "IWSLT", "speed", "WMT", "speed ", "XSUM", "speed  ", "CNN/DailyMail", "speed   "),
    (
        ("large alone", "40.32", "-", "31.38", "-", "35.08", "-", "41.54", "-"),
        ("unaligned, no loss", "40.33", "1.43", "31.28", "1.34", "35.12", "1.48", "41.44", "1.71"),
        ("unaligned, 1 point", "39.44", "1.58", "30.47", "1.43", "34.02", "1.72", "40.57", "2.05"),
        ("aligned, no loss", "40.24", "1.62", "31.26", "1.47", "35.05", "1.50", "41.52", "1.85"),
        ("aligned, 1 point", "39.13", "1.78", "30.33", "1.70", "33.95", "1.80", "40.96", "2.12"),
    ),
)
CURVES = Claim(
    PAIRS,
    T4,
    "quality against latency over both thresholds",
    words="Curves without printed numbers. The text: alignment moves the curve up everywhere; speculative sampling "
    "with windows of 3 to 10 is at 1.28 (IWSLT, BLEU 39.93) and 1.25 (XSUM, ROUGE-L 35.00).",
)
ABLATIONS = Claim(
    PAIRS,
    T4,
    "quality against latency without rollback, and without fallback",
    words="Curves without printed numbers. The text: without either policy quality falls, most where it is high.",
)
EARLY_EXIT = Claim(
    "mT5-small with its first layer (of 8) as the small model, trained to be read there",
    T4,
    f"{OVER}, within less than one point of BLEU",
    ("", "IWSLT", "WMT"),
    (("BiLD, early exit, up to", "1.60", "1.74"),),
    "Curves of BLEU against latency otherwise, without printed numbers.",
)
OPERATIONS = Claim(
    "T5-large with T5-small, CNN/DailyMail",
    T4,
    "operations of the aligned pair at the large model's quality, the large model alone = 1",
    ("", "of the large model alone"),
    (
        ("FLOPs", "slightly more"),
        ("memory operations", "about 1/5"),
        ("arithmetic intensity", "about 5"),
        ("speed", "1.85"),
    ),
)
LEVELS = Claim(
    "T5-large with aligned T5-small, XSUM and CNN/DailyMail",
    T4,
    "ROUGE-L against latency, a curve for each rollback threshold",
    words="Curves without printed numbers. Smaller rollback thresholds roll back more; each curve runs over fallback "
    "thresholds.",
)
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
    bild.EXPERIMENT.of_paper("BiLD", "Table 1", BEST, **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 4", CURVES, **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 5", ABLATIONS, **QUICK | {"ablations": True}),
    replace(bild.EXPERIMENT, run=early_exit).of_paper("BiLD", "Figure 6", EARLY_EXIT, **QUICK, drafters=()),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 8", OPERATIONS, **QUICK),
    bild.EXPERIMENT.of_paper("BiLD", "Figure 9", LEVELS, **QUICK),
)
