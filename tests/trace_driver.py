"""Recorded runs of every kind of drafter, for tests of traces."""

from __future__ import annotations

import functools
from typing import Any

from drafters_for_tests import RandomTree
from generate_driver import NEW, SAMPLED, drafters, hf, left_pad, prompts, references_of
from in_model_driver import make
from pruning_driver import pruner
from zoo import build

import draftree
from draftree.drafting import Merge
from draftree.engine import Recorder, generate
from draftree.shaping import Fixed


@functools.cache
def references(name: str = "llama") -> Any:
    rows = prompts()
    ids, mask = left_pad(rows)
    return references_of(rows, hf(build(name), ids, mask))


def trie() -> Any:
    return drafters(references())["lookahead"]()


def merged(model: Any) -> Merge:
    return Merge([trie(), make("medusa", model)])


CASES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": lambda m: None},
    "random": {"drafter": lambda m: RandomTree(references(), seed=1)},
    "trie": {"drafter": lambda m: trie()},
    "trie-pruned": {"drafter": lambda m: trie(), "pruner": lambda m: pruner(m, 1, top_k=30)},
    "in-model": {"drafter": lambda m: drafters(references())["in-model"]()},
    "transfer-pruned": {"drafter": lambda m: make("hidden-transfer", m), "pruner": lambda m: pruner(m, 2, top_k=30)},
    "bita-sampled": {"drafter": lambda m: make("bita", m), "options": SAMPLED | {"seed": 3}},
    "merged-pruned": {"drafter": merged, "pruner": lambda m: pruner(m, 1, top_k=30)},
    "draft-model": {"drafter": lambda m: drafters(references())["draft-model"]()},
    "typical": {"drafter": lambda m: make("medusa", m), "options": {"acceptance": draftree.LossyTypical()}},
    "strict": {"drafter": lambda m: RandomTree(references(), seed=1), "options": {"strict": True}},
}  # fmt: skip


def record(case: str, runner: str = "auto", node_budget: int = 12) -> tuple[Recorder, Any]:
    """Run a ragged batch of `case` and return its recorder and output."""
    model, what = build("llama"), CASES[case]
    ids, mask = left_pad(prompts())
    recorder = Recorder()
    out = generate(
        model,
        ids,
        mask,
        drafter=what["drafter"](model),
        pruner=what["pruner"](model) if "pruner" in what else None,
        shape=None if case == "plain" else Fixed(node_budget),
        runner=runner,
        max_new_tokens=NEW,
        recorder=recorder,
        **what.get("options", {}),
    )
    return recorder, out
