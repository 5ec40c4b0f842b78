"""Drafters that know nothing of the text: what is left of the plain speed with dynamic trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, measure, points, table_of
from benchmarks.harness.measure import all_differing, length, of, per_token, size
from benchmarks.shapes.subjects import OPTIONS, batches
from draftree.drafting import Medusa
from draftree.shaping import DynamicTree

STRANGE = 60  # texts of random tokens that a foreign trie has seen


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """What is left of plain speed where nothing can be drafted."""
    vocabulary = int(setup.small.config.vocab_size)
    strange = np.random.default_rng(0).integers(0, vocabulary, (STRANGE, setup["max_new_tokens"])).tolist()
    foreign = {
        "trie of random tokens": lambda: setup.trie(strange),
        "untrained heads": lambda: Medusa.fresh(setup.model),
    }
    rows: list[dict[str, Any]] = []
    wrong = 0
    for batch in batches(setup):
        ways = [Way(PLAIN), *(Way(name, make(), DynamicTree()) for name, make in foreign.items())]
        runs = measure(setup, ways, batch=batch, stop=False)
        wrong += all_differing(runs)
        for name in foreign:
            own = of(runs, name)
            over = per_token(of(runs, PLAIN)) / per_token(own)
            facts = {"drafter": name, "batch": batch} | over.columns("over_plain")
            rows.append(facts | {"draft_tokens_a_step": size(own), "acceptance_length": length(own).value})
        yield table_of(rows, differing=wrong)


EXPERIMENT = Experiment(
    run,
    ("drafter", "batch", "over_plain", "draft_tokens_a_step", "acceptance_length"),
    points("over_plain", label=("drafter", "batch")),
    {name: OPTIONS[name] for name in ("per_set", "max_new_tokens", "sets")} | {"batch": (1, 16)},
    name="worst-case",
)
