"""Early pruning by layer and top-k: what leaves inside the pass, what it costs in acceptance, what it brings in
time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, lines, measure, table_of
from benchmarks.harness.measure import all_differing, length, of, per_token
from benchmarks.shapes.subjects import DRAFTERS, OPTIONS, fresh, heads
from draftree.drafting import Drafter
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.shaping import Fixed

WHOLE = "whole"


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Trees of a fixed size pruned inside the pass, against the same trees whole."""
    nodes = setup["nodes"]
    subjects = {name: (partial(fresh, setup, name), nodes) for name in setup.named}
    for table, _ in compared(setup, heads(setup), subjects):
        yield table


def compared(
    setup: Setup, early: Sequence[EarlyHead], subjects: Mapping[str, tuple[Callable[[], Drafter], int]]
) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Yield a row for each drafter, head and top-k, and what they did; drafters come with the size of their trees."""
    rows: list[dict[str, Any]] = []
    wrong = 0
    batch = setup["batch"]
    together: dict[str, Any] = {"batch": batch, "stop": batch == 1}
    plain = measure(setup, [Way(PLAIN)], **together)
    for name, (make, nodes) in subjects.items():
        ways = [Way(WHOLE, make(), Fixed(nodes))]
        for head in early:
            for k in setup["top_k"]:
                pruner = EarlyPruning(head, top_k=k, always=True)
                ways.append(Way(f"{head.layer}/{k}", make(), Fixed(nodes), {"pruner": pruner}))
        runs = measure(setup, ways, **together)
        wrong += all_differing(runs, plain)
        whole = of(runs, WHOLE)
        for way in ways:
            own, (layer, _, k) = of(runs, way.name), way.name.partition("/")
            facts = {} if way.name == WHOLE else {"layer": int(layer), "top_k": int(k)}
            rows.append(
                {"drafter": name, "layer": None, "top_k": None}
                | facts
                | {"pruned": own["pruned"].sum() / max(own["drafted"].sum(), 1)}
                | length(own).columns("acceptance_length")
                | (length(own) / length(whole)).columns("over_whole")
                | (per_token(own) / per_token(whole)).columns("seconds_a_token_over_whole")
                | {"tokens_a_second": 1 / per_token(own).value}
            )
        yield table_of(rows, differing=wrong), runs


EXPERIMENT = Experiment(
    run,
    (
        *("drafter", "layer", "top_k", "pruned", "acceptance_length", "over_whole", "seconds_a_token_over_whole"),
        "tokens_a_second",
    ),
    lines("pruned", "over_whole", by="layer", panel="drafter"),
    OPTIONS
    | {"drafters": ("lookahead", "bita", *DRAFTERS[1:]), "nodes": 32}
    | {"top_k": (1, 2, 4, 8, 16, 50), "early_heads": ("early-head",), "batch": 1},
    name="pruning",
    source="ProPD, Table 2",
)
