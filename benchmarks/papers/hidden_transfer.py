"""Hidden Transfer's tables and figures (Wu et al., 2024).

Tables 1 to 5 set it against Medusa at equal depth, with one static tree for both: that of `nodes` draft tokens which is
best for the mean of their accuracies on other prompts than the measured ones. The paper's four tables of lengths
differ by their model, so the four runs are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.drafters import draft_accuracy, pseudo_cosine
from benchmarks.drafters.subjects import subjects
from benchmarks.harness import Experiment, Setup, Share, bars, lines, on_demand, table_of
from benchmarks.harness.claims import claims_of
from benchmarks.harness.comparisons import CLAIMED, LENGTH, SPEED, Comparison, rows_of
from benchmarks.harness.trees import SEARCHED, Case, anew, with_depth, with_tree
from benchmarks.harness.truth import Hits, hits_of
from benchmarks.papers.ways import COLUMNS, QUICK, Cell, compared
from draftree.drafting.hidden_transfer import default_transfer_layers
from draftree.drafting.in_model import InModelDrafter
from draftree.runner import inspect_model
from draftree.shaping.static import best_choices

PAPER, DEPTH = "Hidden Transfer", 3
HEADS = ("hidden-transfer", "medusa")
SELF = "self-speculative"
PUBLISHED = "hidden-transfer, the paper's training"
MODEL = "LLaMA-2-Chat-13B"  # of Table 1; the one with all three methods


def speeds(setup: Setup) -> Iterator[pd.DataFrame]:
    """Hidden Transfer, Medusa and self-speculation over plain decoding: equal depth and tree, and sized by cost."""
    known = subjects(setup, *HEADS, SELF)
    heads = {name: one for name, one in known.items() if isinstance(one, InModelDrafter)}
    if setup["paper_training"]:
        heads[PUBLISHED] = with_depth(on_demand.drafter(setup, "hidden-transfer", {}), setup["depth"] or DEPTH)
    remarks = [on_demand.remark(setup)] if setup["paper_training"] else []
    tree = shared_tree(setup, list(heads.values()))
    cells = [
        Cell(name, partial(setup.trained, setup.named[name]), None, _printed(one))
        for name, one in known.items()
        if name not in heads
    ]
    for name, one in heads.items():
        cells.append(Cell(f"{name}, one tree", partial(with_tree, one, tree), tree.nodes, _printed(one)))
    cells += [Cell(f"{name}, by cost", partial(anew, one), None) for name, one in heads.items()]
    claims = []
    for tree_of in ("one tree", "by cost"):
        ours, theirs, published = (f"{name}, {tree_of}" for name in (*HEADS, PUBLISHED))
        for by, kind in (("speed", SPEED), ("length", LENGTH)):
            if kind == LENGTH and tree_of != "one tree":
                continue  # sized trees differ in their sizes
            if set(HEADS) <= set(heads):
                claims.append(Comparison(f"hidden-transfer-medusa-{by}", ours, (theirs,), kind))
            if {PUBLISHED, HEADS[1]} <= set(heads):
                claims.append(Comparison(f"hidden-transfer-published-medusa-{by}", published, (theirs,), kind))
        if SELF in known and HEADS[0] in heads:
            claims.append(Comparison("hidden-transfer-self-speculative", ours, (SELF,)))
    remarks.append(f"The tree that both share has {tree.nodes} draft tokens, searched on {len(setup.lessons)} prompts.")
    yield from compared(setup, cells, by_set=True, claims=claims, remarks=remarks)


def shared_tree(setup: Setup, heads: list[InModelDrafter]) -> Case:
    """The tree of `nodes` draft tokens that is best for the mean of these drafters' accuracies.

    Raises:
        ValueError: no drafter inside the model, or no prompts to search on.
    """
    if not heads:
        raise ValueError(f"There is no drafter inside the model to compare: name {' and '.join(HEADS)}, or folders.")
    if not setup.lessons:
        raise ValueError("There are no prompts but the measured ones to search a tree on: give more prompts.")
    setup.watcher.stage("search for the tree", len(heads) * len(setup.lessons))
    depth = min(one.depth for one in heads)
    shares = [hits_of(setup, one, setup.lessons).by_rank[:depth] for one in heads]
    nodes = tuple(best_choices(np.mean(shares, 0).tolist(), setup["nodes"]))
    return Case(SEARCHED, "one tree", nodes, len(nodes))


def accuracy(setup: Setup) -> Iterator[pd.DataFrame]:
    """Share of cases with the truth among the best k: Hidden Transfer, Medusa, and heads that read a middle layer."""
    found = subjects(setup, *draft_accuracy.METHODS)
    remarks = []
    if setup["early_exits"]:
        layer = len(inspect_model(setup.small).layers) // 2
        settings = {"layer": layer, "places": DEPTH + 1, "rank": 0}
        found[f"early exit, layer {layer}"] = on_demand.drafter(setup, "early-head", settings)
        remarks = [on_demand.remark(setup)]
    hits: dict[str, Hits] = {}
    for table in draft_accuracy.compared(setup, found, remarks, hits):
        table.attrs["tables"] = {**table.attrs["tables"], CLAIMED: rows_of(_accuracies(hits, found))}
        yield table


def _accuracies(hits: dict[str, Hits], found: dict[str, Any]) -> list[tuple[str, str, str, str, Share]]:
    """Top-1 accuracy of Hidden Transfer over that of the others, at each place that both speak of."""
    ratios = []
    by_method = {found[name].method: (name, one) for name, one in hits.items()}
    for other in ("medusa", "early-head"):
        if "hidden-transfer" not in by_method or other not in by_method:
            continue
        (name, one), (their_name, theirs) = by_method["hidden-transfer"], by_method[other]
        for place in sorted(set(one.places) & set(theirs.places)):
            ratio = one.top(one.places.index(place), 1) / theirs.top(theirs.places.index(place), 1)
            claim = f"hidden-transfer-accuracy-{other}-{place}"
            ratios.append((claim, name, their_name, "top-1 accuracy", ratio))
    return ratios


def _printed(drafter: Any) -> str:
    """What the paper has for a drafter's method."""
    method = {SELF: "self-speculative", "medusa": "Medusa", "hidden-transfer": "Hidden Transfer"}[drafter.method]
    return claims_of(PAPER)["Table 1"].cell(f"{MODEL}, {method}", "XSum")


def transfer_layer(setup: Setup) -> Iterator[pd.DataFrame]:
    """Accuracy of a transfer by its layer: the first one, or the second behind a first one that stays."""
    yield from _by_layer(setup, setup["first_layer"])


def second_transfer_layer(setup: Setup) -> Iterator[pd.DataFrame]:
    """Accuracy of the second transfer by its layer, behind a first one that stays: the paper's, scaled to the model."""
    yield from _by_layer(
        setup, setup["first_layer"] or default_transfer_layers(len(inspect_model(setup.small).layers))[0]
    )


def _by_layer(setup: Setup, first: int) -> Iterator[pd.DataFrame]:
    count = len(inspect_model(setup.small).layers)
    layers = [int(layer) for layer in setup["layers"]] or range(max(first, 1), count)
    if min(layers) < max(first, 1) or max(layers) >= count:
        least = f"{first}, the first transfer's, to {count - 1}" if first else f"1 to {count - 1}"
        raise ValueError(f"A transfer is made behind a layer: give layers from {least}, the model has {count}.")
    found = _trained(setup, {f"layer {n}": {"transfer_layers": [first, n] if first else [n]} for n in layers})
    steps = {name: one.settings["transfer_layers"] for name, one in found.items()}
    hits: dict[str, Hits] = {}
    for table in draft_accuracy.compared(setup, found, _remarks(setup), hits):
        wanted = table[table["place"] == (3 if first else 2)]
        made = wanted.assign(layer=[steps[name][1 if first else 0] for name in wanted["drafter"]])
        made = made[made["top"].isin(TOPS)].sort_values(["top", "layer"])
        yield table_of(made.to_dict("records"), **table.attrs)


def masking(setup: Setup) -> Iterator[pd.DataFrame]:
    """Accuracy where pseudo states see one another, and where they do not."""
    found = _trained(setup, {"seen": {"masked": False}, "masked": {"masked": True}})
    hits: dict[str, Hits] = {}
    for table in draft_accuracy.compared(setup, found, _remarks(setup), hits):
        if set(hits) == {"seen", "masked"}:
            ratio = hits["seen"].top(1, 1) / hits["masked"].top(1, 1)
            rows = rows_of([("hidden-transfer-masked", "seen", "masked", "top-1 accuracy, second transfer", ratio)])
            table.attrs["tables"] = {**table.attrs["tables"], CLAIMED: rows}
        yield table


def _trained(setup: Setup, points: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The drafters that are named, or one trained now for each point."""
    if setup["drafters"]:
        return subjects(setup, "hidden-transfer")
    return {name: on_demand.drafter(setup, "hidden-transfer", settings) for name, settings in points.items()}


def _remarks(setup: Setup) -> list[str]:
    return [] if setup["drafters"] else [on_demand.remark(setup)]


TOPS = (1, 2, 3, 5, 10)
TABLE = Experiment(
    "",
    "",
    speeds,
    COLUMNS,
    bars("over_plain", "acceptance_length", label="way"),
    QUICK
    | on_demand.OPTIONS
    | {"drafters": (*HEADS, SELF), "depth": DEPTH, "nodes": 16, "warm_per_set": 4, "paper_training": True},
)
ACCURACY = Experiment(
    "",
    "",
    accuracy,
    draft_accuracy.EXPERIMENT.columns,
    draft_accuracy.EXPERIMENT.plot,
    dict(draft_accuracy.EXPERIMENT.options)
    | on_demand.OPTIONS
    | {"drafters": HEADS, "early_exits": True, "depth": DEPTH},
)
TRAINED: dict[str, Any] = dict(draft_accuracy.EXPERIMENT.options) | on_demand.OPTIONS | {"drafters": ()}
LAYER = Experiment(
    "",
    "",
    transfer_layer,
    ("layer", "top", "accuracy", "cases"),
    lines("layer", "accuracy", by="top"),
    TRAINED | {"layers": (), "first_layer": 0},
)
EXPERIMENTS = (
    *(TABLE.of_paper(PAPER, f"Table {n}") for n in (1, 2, 3, 4, 5)),
    ACCURACY.of_paper(PAPER, "Figure 3"),
    pseudo_cosine.EXPERIMENT.of_paper(PAPER, "Figure 4"),
    LAYER.of_paper(PAPER, "Figure 5"),
    replace(LAYER, run=second_transfer_layer).of_paper(PAPER, "Figure 6"),
    replace(ACCURACY, run=masking, options=TRAINED).of_paper(PAPER, "Figure 7"),
)
