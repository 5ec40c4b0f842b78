"""ProPD's tables and figures (Zhong et al., 2024)."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Claim
from benchmarks.shapes import batch, pruning, step_cost

BATCHES = Claim(
    "Vicuna (33B in 4 bit at batch 4 and 8)",
    "one A6000 for 7B, A100 for 13B and 33B",
    "speed over autoregressive decoding of the same batch",
    ("model", "batch 1", "2", "4", "8", "16"),
    (
        ("7B", "1.95", "1.81", "1.51", "1.58", "1.39"),
        ("13B", "1.67", "1.70", "1.68", "1.53", "1.35"),
        ("33B", "1.86", "1.81", "1.50", "1.33", "/"),
    ),
)
PRUNING = Claim(
    "a Vicuna model whose size the table does not name, batch 4",
    "one A6000 or A100",
    "share of nodes pruned, acceptance length, tokens a second",
    ("layer, top-k", "pruned", "acceptance length", "tokens/s"),
    (
        ("without", "-", "2.46", "28.43"),
        ("1, 50", "79.0 %", "2.26", "43.26"),
        ("1, 100", "73.0 %", "2.32", "43.19"),
        ("1, 150", "68.6 %", "2.35", "42.98"),
        ("1, 200", "64.7 %", "2.41", "42.87"),
        ("2, 50", "77.3 %", "2.32", "43.01"),
        ("2, 100", "70.9 %", "2.37", "42.94"),
        ("2, 150", "65.5 %", "2.42", "42.85"),
        ("2, 200", "61.5 %", "2.44", "42.67"),
        ("3, 50", "76.6 %", "2.32", "42.66"),
        ("3, 100", "68.3 %", "2.44", "42.69"),
        ("3, 150", "63.0 %", "2.43", "42.48"),
        ("3, 200", "59.0 %", "2.46", "42.28"),
        ("4, 50", "74.0 %", "2.43", "42.28"),
        ("4, 100", "66.9 %", "2.45", "42.20"),
        ("4, 150", "62.1 %", "2.48", "42.10"),
        ("4, 200", "57.6 %", "2.49", "41.94"),
    ),
)
ABLATION = Claim(
    "Vicuna",
    "one A6000 for 7B, A100 for 13B and 33B",
    "speed over the same trees with neither part (Medusa)",
    ("pruning, dynamic", "7B: 1", "2", "4", "8", "16", "13B: 2", "33B: 2"),
    (
        ("neither", "1", "1", "1", "1", "1", "1", "1"),
        ("pruning", "0.99", "1.18", "1.56", "1.78", "1.82", "1.20", "1.24"),
        ("dynamic", "1.04", "1.05", "1.50", "1.74", "2.17", "1.17", "1.15"),
        ("both", "1.04", "1.27", "1.76", "2.34", "3.28", "1.29", "1.34"),
    ),
    "Headings are batch sizes.",
)
COSTS = Claim(
    "a Vicuna model whose size the figure does not name",
    "GPUs",
    "accuracy of early layers; iteration time by tree size, batch and length; acceptance length by task",
    words="Curves with few printed numbers. The text: layer 2 has the truth as its first choice in about 37 % of "
    "cases, and far oftener among its best 50; iteration time grows in a straight line with the tree.",
)


MEDUSA: dict[str, Any] = {"drafters": ("medusa",)}
SIZES: dict[str, Any] = MEDUSA | {"batch": (1, 2, 4, 8), "sizes": (2, 4, 8)}
EXPERIMENTS = (
    batch.EXPERIMENT.of_paper("ProPD", "Table 1", BATCHES, **SIZES),
    pruning.EXPERIMENT.of_paper("ProPD", "Table 2", PRUNING, **MEDUSA),
    batch.EXPERIMENT.of_paper("ProPD", "Table 3", ABLATION, **SIZES),
    step_cost.EXPERIMENT.of_paper("ProPD", "Figure 3", COSTS, **MEDUSA),
)
