"""BiTA's Table 2: BiTA beside ways of drafting that were known before it, on the same prompts."""

from __future__ import annotations

from functools import partial

from draftree.bench.analysis_setup import Findings
from draftree.bench.papers.bita_claims import METHODS
from draftree.bench.papers.lookahead import Cell, LookaheadSetup, compare
from draftree.drafting import Jacobi, SelfSpeculative


def methods(setup: LookaheadSetup) -> Findings:
    """Drafting with a small model, half the model, n-grams of its own, and BiTA; trees sized by cost."""
    half = setup.model.config.num_hidden_layers // 2
    cells = [
        Cell("DraftModel (SpecDec)", partial(setup.trained, "draft-model"), None, METHODS.cell("SpecDec", "70B")),
        Cell(
            f"SelfSpeculative, {half} layers",
            partial(SelfSpeculative, exit_layer=half),
            None,
            METHODS.cell("Self-SpecDec", "7B"),
        ),
        Cell("Jacobi (Lookahead, Fu et al.)", Jacobi, None, METHODS.cell("Lookahead (Fu et al.)", "7B")),
        Cell("BiTA", partial(setup.trained, "bita"), None, METHODS.cell("BiTA", "7B")),
        Cell("BiTA, trees of fixed size", partial(setup.trained, "bita"), setup.nodes, ""),
    ]
    found = compare(setup, cells, "Methods", "paper: LLaMA-2, MT-Bench,\nA800 (7B; SpecDec 70B)")
    found.remarks.append("Of these only BiTA and the small model were trained for this model's answers.")
    return found
