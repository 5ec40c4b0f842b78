"""Hidden Transfer's tables and figures (2024)."""

from __future__ import annotations

from typing import Any

from benchmarks.drafters import acceptance, draft_accuracy, pseudo_cosine, sweeps, wall_clock

HEADS = ("hidden-transfer", "medusa")
PAPER = "Hidden Transfer"
SWEEP: dict[str, Any] = {"drafters": (), "nodes": (8,)}
# The paper's four tables of lengths differ by their model, so the four runs are the same.
TREES: dict[str, Any] = {"drafters": HEADS, "nodes": (8, 16), "trees": ("straightforward", "best-first")}

EXPERIMENTS = (
    wall_clock.EXPERIMENT.of_paper(PAPER, "Table 1", drafters=HEADS),
    *(acceptance.EXPERIMENT.of_paper(PAPER, f"Table {n}", **TREES) for n in (2, 3, 4, 5)),
    draft_accuracy.EXPERIMENT.of_paper(PAPER, "Figure 3", drafters=(*HEADS, "early-head")),
    pseudo_cosine.EXPERIMENT.of_paper(PAPER, "Figure 4"),
    sweeps.TRANSFER_LAYER.of_paper(PAPER, "Figure 5", **SWEEP),
    sweeps.TRANSFER_LAYER.of_paper(PAPER, "Figure 6", **SWEEP),
    draft_accuracy.EXPERIMENT.of_paper(PAPER, "Figure 7", drafters=()),
)
