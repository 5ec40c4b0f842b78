"""ProPD's tables and figures (Zhong et al., 2024)."""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import batch, pruning, step_cost

MEDUSA: dict[str, Any] = {"drafters": ("medusa",)}
SIZES: dict[str, Any] = MEDUSA | {"batch": (1, 2, 4, 8), "sizes": (2, 4, 8)}
EXPERIMENTS = (
    batch.EXPERIMENT.of_paper("ProPD", "Table 1", **SIZES),
    pruning.EXPERIMENT.of_paper("ProPD", "Table 2", **MEDUSA),
    batch.EXPERIMENT.of_paper("ProPD", "Table 3", **SIZES),
    step_cost.EXPERIMENT.of_paper("ProPD", "Figure 3", **MEDUSA),
)
