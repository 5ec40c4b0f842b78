"""Hidden Transfer's tables and figures (2024)."""

from __future__ import annotations

from typing import Any

from benchmarks.drafters import acceptance, draft_accuracy, pseudo_cosine, sweeps, wall_clock
from benchmarks.harness import Claim

A100 = "one A100-80G"

TIMES = Claim(
    "models as in the rows",
    A100,
    "speed over autoregressive decoding",
    ("model, method", "XSum", "GSM8K"),
    (
        ("LLaMA-2-Chat-13B, self-speculative", "1.241", "1.216"),
        ("LLaMA-2-Chat-13B, Medusa", "1.325", "1.976"),
        ("LLaMA-2-Chat-13B, Hidden Transfer", "1.532", "2.275"),
        ("Vicuna-13B, self-speculative", "1.125", "1.118"),
        ("Vicuna-13B, Medusa", "1.247", "1.869"),
        ("Vicuna-13B, Hidden Transfer", "1.419", "2.150"),
        ("LLaMA-2-Chat-7B, Medusa", "1.465", "1.762"),
        ("LLaMA-2-Chat-7B, Hidden Transfer", "1.816", "2.135"),
        ("Vicuna-7B, Medusa", "1.388", "1.732"),
        ("Vicuna-7B, Hidden Transfer", "1.786", "2.219"),
    ),
)


def _lengths(model: str, medusa: tuple[str, str], ours: tuple[str, str]) -> Claim:
    return Claim(
        model,
        A100,
        "tokens a forward pass",
        ("method", "XSum", "GSM8K"),
        (("autoregressive", "1.000", "1.000"), ("Medusa", *medusa), ("Hidden Transfer", *ours)),
    )


LENGTHS = {
    "Table 2": _lengths("Vicuna-13B", ("1.756", "2.086"), ("2.040", "2.425")),
    "Table 3": _lengths("LLaMA-2-Chat-13B", ("1.870", "2.228"), ("2.200", "2.585")),
    "Table 4": _lengths("Vicuna-7B", ("1.676", "2.022"), ("2.255", "2.577")),
    "Table 5": _lengths("LLaMA-2-Chat-7B", ("1.760", "2.047"), ("2.260", "2.473")),
}
ACCURACY = Claim(
    "LLaMA-2-Chat-13B, data sets XSum and GSM8K",
    A100,
    "share of cases with the truth among the best k predictions, for the second to fourth token ahead",
    words="Curves without printed numbers. The text: Hidden Transfer is above Medusa heads and early exits throughout.",
)
COSINE = Claim(
    "a model that the figure does not name, data sets XSum and GSM8K",
    A100,
    "cosine similarity of pseudo and real hidden states by layer",
    words="Curves without printed numbers. The text: states come closer from layer to layer.",
)
FIRST_LAYER = Claim(
    "Vicuna-7B and LLaMA-2-Chat-7B (32 layers)",
    A100,
    "accuracy of the first transfer by its layer (5, 10, 15, 20, 25)",
    words="Curves without printed numbers. The text: about the same up to the middle of the model, then falling fast.",
)
SECOND_LAYER = Claim(
    "Vicuna-7B and LLaMA-2-Chat-7B (32 layers)",
    A100,
    "accuracy of the second transfer by its layer, the first one at layer 15",
    words="Curves without printed numbers; layers a few behind the first transfer's are chosen.",
)
MASKED = Claim(
    "models that the figure does not name, transfers at layers 15 and 20",
    A100,
    "accuracy of the second transfer where pseudo states see each other or do not",
    words="Curves without printed numbers. The text: it falls where they do not see each other.",
)
HEADS = ("hidden-transfer", "medusa")


PAPER = "Hidden Transfer"
SWEEP: dict[str, Any] = {"drafters": (), "nodes": (8,)}
# The paper's four tables of lengths differ by their model, so the four runs are the same.
TREES: dict[str, Any] = {"drafters": HEADS, "nodes": (8, 16), "trees": ("straightforward", "best-first")}

EXPERIMENTS = (
    wall_clock.EXPERIMENT.of_paper(PAPER, "Table 1", TIMES, drafters=HEADS),
    *(acceptance.EXPERIMENT.of_paper(PAPER, table, claim, **TREES) for table, claim in LENGTHS.items()),
    draft_accuracy.EXPERIMENT.of_paper(PAPER, "Figure 3", ACCURACY, drafters=(*HEADS, "early-head")),
    pseudo_cosine.EXPERIMENT.of_paper(PAPER, "Figure 4", COSINE),
    sweeps.TRANSFER_LAYER.of_paper(PAPER, "Figure 5", FIRST_LAYER, **SWEEP),
    sweeps.TRANSFER_LAYER.of_paper(PAPER, "Figure 6", SECOND_LAYER, **SWEEP),
    draft_accuracy.EXPERIMENT.of_paper(PAPER, "Figure 7", MASKED, drafters=()),
)
