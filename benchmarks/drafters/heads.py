"""Drafters with heads, published and trained inside the model, at trees of several sizes and as chains.

Of equal draft tokens a tree holds the likeliest paths, a chain one path. Each answer comes from a fresh engine for
each drafter and size; sized trees pay for what they try.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, measure, points, table_of
from benchmarks.harness.measure import all_differing, length, of, size, whole
from benchmarks.harness.trees import CHAIN, Case, with_tree
from draftree.drafting import Drafter
from draftree.drafting.in_model import InModelDrafter
from draftree.drafting.published.features import FeatureDrafter
from draftree.shaping import DynamicTree, Fixed

SIZED = "by cost"


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Acceptance length and speed over plain decoding, by draft tokens of a step, as trees and as chains."""
    rows: list[dict[str, Any]] = []
    by_set: list[dict[str, Any]] = []
    wrong = 0
    for (name, folder), batch in product(setup.named.items(), setup["batches"]):
        ways = [Way(PLAIN), *_ways(setup, folder)]
        runs = measure(setup, ways, batch=batch, ready=True)
        wrong += all_differing(runs)
        for way in ways[1:]:
            shape, _, nodes = way.name.partition(" ")
            rows.append({"drafter": name, "batch": batch, "shape": shape, "nodes": nodes} | _figures(runs, way.name))
            if batch == 1:
                facts = {"drafter": name, "way": way.name}
                by_set += [facts | {"set": one} | _figures(runs, way.name, one) for one in setup.sets]
        yield table_of(rows, differing=wrong, tables={"Set by set": pd.DataFrame(by_set)})


def _ways(setup: Setup, folder: str) -> list[Way]:
    ways = [Way(f"tree {n}", setup.drafter(folder), Fixed(n)) for n in setup["sizes"]]
    for n in setup["chains"]:
        made = chain(setup.drafter(folder), n)
        ways += [] if made is None else [Way(f"chain {n}", made, Fixed(n))]
    return [*ways, Way(f"tree {SIZED}", setup.drafter(folder), DynamicTree())]


def chain(drafter: Drafter, nodes: int) -> Drafter | None:
    """Return a drafter with the same weights that drafts one path; None for what drafts no chain."""
    if isinstance(drafter, InModelDrafter):
        depth = min(nodes, drafter.steps)
        return with_tree(drafter, Case(CHAIN, tuple((0,) * n for n in range(1, depth + 1)), depth))
    if isinstance(drafter, FeatureDrafter):
        drafter.branching = 1
        for option, value in {"beam": 1, "depth": nodes, "confidence": 0.0}.items():
            setattr(drafter, option, value)
        return drafter
    return None


def _figures(runs: pd.DataFrame, way: str, one_set: str | None = None) -> dict[str, Any]:
    """Return the figures of a way on all prompts, or those of one set."""
    own, plain = of(runs, way, one_set), of(runs, PLAIN, one_set)
    return (
        length(own).columns("acceptance_length")
        | (whole(plain) / whole(own)).columns("over_plain")
        | {"draft_tokens_a_step": size(own), "drafting": float(own["draft"].sum() / own["seconds"].sum())}
    )


EXPERIMENT = Experiment(
    run,
    ("drafter", "batch", "shape", "nodes", "draft_tokens_a_step", "acceptance_length", "over_plain", "drafting"),
    points("over_plain", label=("drafter", "batch", "shape", "nodes")),
    {
        **{"per_set": 2, "max_new_tokens": 96, "sets": (), "drafters": ("medusa",), "warm_per_set": 8},
        **{"sizes": (4, 8, 16, 32, 64), "chains": (4, 8), "batches": (1,)},
    },
    name="heads",
)
