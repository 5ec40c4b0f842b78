"""BiTA's Table 2: BiTA beside ways of drafting that were known before it, on the same prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from draftree.bench.analysis_setup import Findings
from draftree.bench.papers.bita_claims import METHODS
from draftree.bench.papers.lookahead import Cell, LookaheadSetup, compare
from draftree.drafting import Drafter, Jacobi, SelfSpeculative


def methods(setup: LookaheadSetup) -> Findings:
    """A small model, half the model, n-grams of its own, and BiTA: trees of one size, and trees sized by cost."""
    half, says = setup.model.config.num_hidden_layers // 2, METHODS.cell
    known: list[tuple[str, Callable[[], Drafter], str]] = [
        ("DraftModel (SpecDec)", partial(setup.trained, "draft-model"), says("SpecDec", "70B")),
        (f"SelfSpeculative, {half} layers", partial(SelfSpeculative, exit_layer=half), says("Self-SpecDec", "7B")),
        ("Jacobi (Lookahead, Fu et al.)", Jacobi, says("Lookahead (Fu et al.)", "7B")),
        ("BiTA", partial(setup.trained, "bita"), says("BiTA", "7B")),
    ]
    cells = [Cell(name, make, setup.nodes, paper) for name, make, paper in known]
    cells += [Cell(f"{name}, by cost", make, None) for name, make, _ in known]
    found = compare(setup, cells, "Methods", "paper: LLaMA-2, MT-Bench,\nA800 (7B; SpecDec 70B)")
    found.remarks.append("Of these only BiTA and the small model were trained for this model's answers.")
    return found
