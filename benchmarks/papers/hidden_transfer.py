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
from benchmarks.harness import PLAIN, Experiment, Setup, Share, bars, lines, on_demand, table_of
from benchmarks.harness.claims import claims_of
from benchmarks.harness.comparisons import LENGTH, SPEED, Comparison
from benchmarks.harness.trees import Case, anew, with_depth, with_tree
from benchmarks.harness.truth import Hits, hits_of
from benchmarks.papers.ways import COLUMNS, QUICK, compared, sized
from draftree.drafting.hidden_transfer import default_transfer_layers
from draftree.drafting.in_model import InModelDrafter
from draftree.runner import inspect_model
from draftree.tree.static import best_choices

PAPER, DEPTH = "Hidden Transfer", 3
HEADS = ("hidden-transfer", "medusa")
SELF = "self-speculative"
ALIKE = ", trained here"
ALIKE_MEDUSA = f"medusa{ALIKE}"
SETTINGS: dict[str, dict[str, Any]] = {"hidden-transfer": {}, "medusa": {"heads": DEPTH, "own_head": True}}
LATE = 25 / 32  # of the layers: the last one of Figure 5
METHODS = (*HEADS, "early-head")
PUBLISHED = "hidden-transfer, the paper's training"
MODEL = "LLaMA-2-Chat-13B"  # of Table 1; the one with all three methods
Claimed = tuple[str, str, str, str, Share]  # see `rows_of`


def speeds(setup: Setup, item: str = "Table 1") -> Iterator[pd.DataFrame]:
    """Hidden Transfer, Medusa and self-speculation over plain decoding: equal depth and tree, and sized by cost."""
    trains = setup["paper_training"] and tuple(setup["drafters"]) == (*HEADS, SELF)  # nothing beside named drafters
    if trains:
        _check_trained_depth(setup, "paper_training")
    _ = setup.searched_on  # refuses none before anything is trained
    known = subjects(setup, *HEADS, SELF)
    heads = {name: one for name, one in known.items() if isinstance(one, InModelDrafter)}
    remarks = _layers(setup, known)
    if trains:
        for name, method in ((PUBLISHED, HEADS[0]), (ALIKE_MEDUSA, HEADS[1])):
            trained = on_demand.drafter(setup, method, SETTINGS[method])
            heads[name] = with_depth(trained, setup["depth"] or DEPTH)
        remarks.append(on_demand.remark(setup))
    tree = shared_tree(setup, list(heads.values()))
    ways = []
    for name, one in known.items():
        if name not in heads:
            says, again = f"{name}, {setup['nodes']} draft tokens", setup.trained(setup.named[name])
            ways.append(sized(says, one, setup["nodes"], _printed(one, item)))
            ways.append(sized(f"{name}, by cost", again, None))
    for name, one in heads.items():
        ways.append(sized(f"{name}, one tree", with_tree(one, tree), tree.nodes, _printed(one, item)))
    ways += [sized(f"{name}, by cost", anew(one), None) for name, one in heads.items()]
    claims = []
    own, medusa, half = (next((n for n, one in known.items() if one.method == m), "") for m in (*HEADS, SELF))
    for tree_of in ("one tree", "by cost"):
        for by, kind in (("speed", SPEED), ("length", LENGTH)):
            if kind == LENGTH and tree_of != "one tree":
                continue  # sized trees differ in their sizes
            sides = [
                ("medusa", own, medusa),
                ("published-medusa", *([PUBLISHED, ALIKE_MEDUSA] if trains else ["", ""])),
            ]
            for claim, ours, theirs in sides:
                if ours and theirs:
                    above, below = f"{ours}, {tree_of}", f"{theirs}, {tree_of}"
                    claims.append(Comparison(f"hidden-transfer-{claim}-{by}", above, (below,), kind))
            if own:
                claims.append(Comparison(f"hidden-transfer-plain-{by}", f"{own}, {tree_of}", (PLAIN,), kind))
        if own and half:
            theirs = f"{half}, by cost" if tree_of == "by cost" else f"{half}, {setup['nodes']} draft tokens"
            claims.append(Comparison("hidden-transfer-self-speculative", f"{own}, {tree_of}", (theirs,)))
    remarks.append(f"The tree that both share has {tree.nodes} draft tokens, searched on {len(setup.lessons)} prompts.")
    yield from compared(setup, ways, by_set=True, claims=claims, remarks=remarks)


def _layers(setup: Setup, known: dict[str, Any]) -> list[str]:
    """Return where the transfers are, and where the paper's would be, in a sentence for each drafter."""
    paper = ", ".join(map(str, default_transfer_layers(len(setup.target.layers))))
    own = {name: ", ".join(map(str, one.transfer_layers)) for name, one in known.items() if one.method == HEADS[0]}
    return [f"{name}: transfers behind layers {layers} (the paper's, scaled: {paper})." for name, layers in own.items()]


def shared_tree(setup: Setup, heads: list[InModelDrafter]) -> Case:
    """Return the tree of `nodes` draft tokens that is best for the mean of these drafters' accuracies on other prompts.

    Without drafters inside the model, or without other prompts, there is a ValueError.
    """
    if not heads:
        raise ValueError(f"There is no drafter inside the model to compare: name {' and '.join(HEADS)}, or folders.")
    lessons = setup.searched_on
    setup.watcher.stage("search for the tree", len(heads) * len(lessons))
    depth = min(one.depth for one in heads)
    shares = [hits_of(setup, one, lessons).by_rank[:depth] for one in heads]
    nodes = tuple(best_choices(np.mean(shares, 0).tolist(), setup["nodes"]))
    return Case("one tree", nodes, len(nodes))


def accuracy(setup: Setup) -> Iterator[pd.DataFrame]:
    """Share of cases with the truth among the best k: Hidden Transfer, Medusa, and heads that read a middle layer."""
    trains = setup["early_exits"] and tuple(setup["drafters"]) == HEADS  # nothing beside named drafters
    if trains:
        _check_trained_depth(setup, "early_exits")
    found, depth = subjects(setup, *draft_accuracy.METHODS), setup["depth"] or DEPTH
    remarks = []
    if trains:
        for method in HEADS:
            found[f"{method}{ALIKE}"] = with_depth(on_demand.drafter(setup, method, SETTINGS[method]), depth)
        count = len(inspect_model(setup.small).layers)
        for layer in setup["exit_layers"] or sorted({max(count * quarter // 4, 1) for quarter in (1, 2, 3)}):
            settings = {"layer": layer, "places": depth + 1, "rank": 0}
            found[f"early exit, layer {layer}"] = on_demand.drafter(setup, "early-head", settings)
        remarks = [on_demand.remark(setup) + " An exit's head is a matrix before the model's own head."]
    yield from draft_accuracy.compared(setup, found, remarks, lambda hits: _accuracies(hits, found))


def _check_trained_depth(setup: Setup, option: str) -> None:
    """Refuse a depth beyond that of the drafters which `option` trains."""
    if setup["depth"] > DEPTH:
        raise ValueError(
            f"What is trained here looks {DEPTH} tokens ahead, as in the paper, and depth is {setup['depth']}: give at "
            f"most {DEPTH}, or --set {option}=false."
        )


def _accuracies(hits: dict[str, Hits], found: dict[str, Any]) -> list[Claimed]:
    """Top-1 accuracy of Hidden Transfer over that of the others, at each place that both speak of.

    What was named is compared with what was named, and what was trained here with what was trained here; of several
    exits the best one is taken.
    """
    ratios = []
    for alike in (False, True):
        names = [name for name in hits if (name.endswith(ALIKE) or name.startswith("early exit")) == alike]
        by_method = {method: [name for name in names if found[name].method == method] for method in METHODS}
        for ours in by_method["hidden-transfer"][:1]:
            for other in ("medusa", "early-head"):
                for place in hits[ours].places:
                    there = [name for name in by_method[other] if place in hits[name].places]
                    theirs = [(_top(hits[name], place), name) for name in there]
                    if theirs:
                        share, name = max(theirs, key=lambda one: one[0].value)
                        claim = f"hidden-transfer-accuracy-{other}-{place}"
                        ratios.append((claim, ours, name, "top-1 accuracy", _top(hits[ours], place) / share))
    return ratios


def _top(hits: Hits, place: int) -> Share:
    return hits.top(hits.places.index(place), 1)


def _printed(drafter: Any, item: str) -> str:
    """What a table of the paper has for a drafter's method, on XSum."""
    method = {SELF: "self-speculative", "medusa": "Medusa", "hidden-transfer": "Hidden Transfer"}[drafter.method]
    return claims_of(PAPER)[item].cell(f"{MODEL}, {method}" if item == "Table 1" else method, "XSum")


def transfer_layer(setup: Setup) -> Iterator[pd.DataFrame]:
    """Accuracy of a transfer by its layer: the first one, or the second behind a first one that stays."""
    yield from _by_layer(setup, setup["first_layer"])


def second_transfer_layer(setup: Setup) -> Iterator[pd.DataFrame]:
    """Accuracy of the second transfer by its layer, behind a first one that stays: the paper's, scaled to the model."""
    count = len(inspect_model(setup.small).layers)
    yield from _by_layer(setup, setup["first_layer"] or default_transfer_layers(count)[0])


def _by_layer(setup: Setup, first: int) -> Iterator[pd.DataFrame]:
    count = len(inspect_model(setup.small).layers)
    layers = [int(layer) for layer in setup["layers"]] or range(max(first, 1), count)
    if min(layers) < max(first, 1) or max(layers) >= count:
        least = f"{first}, the first transfer's, to {count - 1}" if first else f"1 to {count - 1}"
        raise ValueError(f"A transfer is made behind a layer: give layers from {least}, the model has {count}.")
    found = _trained(setup, {f"layer {n}": {"transfer_layers": [first, n] if first else [n]} for n in layers})
    layer_of = {name: one.settings["transfer_layers"][1 if first else 0] for name, one in found.items()}
    place = 3 if first else 2

    def claims(hits: dict[str, Hits]) -> list[Claimed]:
        return _by_depth({layer_of[name]: (name, _top(one, place)) for name, one in hits.items()}, first, count)

    for table in draft_accuracy.compared(setup, found, _remarks(setup), claims):
        made = table[(table["place"] == place) & table["top"].isin(TOPS)]
        made = made.assign(layer=made["drafter"].map(layer_of)).sort_values(["top", "layer"])
        yield table_of(made.to_dict("records"), **table.attrs)


def _by_depth(at: dict[int, tuple[str, Share]], first: int, count: int) -> list[Claimed]:
    """The middle layer (or that behind the first transfer) against the first and a late one, of those measured."""
    if len(at) < 3:
        return []
    middle = min(at, key=lambda layer: abs(layer - (first or count / 2)))
    late = max(at) if first else min(at, key=lambda layer: abs(layer - LATE * count))  # the last ones of the figures
    sides = [("late", middle, late)] if first else [("early", middle, min(at)), ("late", middle, late)]
    name = "hidden-transfer-second-layer" if first else "hidden-transfer-layer"
    return [
        (f"{name}-{which}", at[above][0], at[below][0], "top-1 accuracy", at[above][1] / at[below][1])
        for which, above, below in sides
        if above != below
    ]


def masking(setup: Setup) -> Iterator[pd.DataFrame]:
    """Accuracy where pseudo states see one another, and where they do not."""
    found = _trained(setup, {"seen": {"masked": False}, "masked": {"masked": True}})

    def claims(hits: dict[str, Hits]) -> list[Claimed]:
        if set(hits) != {"seen", "masked"}:
            return []
        ratio = hits["seen"].top(1, 1) / hits["masked"].top(1, 1)
        return [("hidden-transfer-masked", "seen", "masked", "top-1 accuracy, second transfer", ratio)]

    yield from draft_accuracy.compared(setup, found, _remarks(setup), claims)


def _trained(setup: Setup, points: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the drafters that are named, or one trained now for each point."""
    if setup["drafters"]:
        return subjects(setup, "hidden-transfer")
    return {name: on_demand.drafter(setup, "hidden-transfer", settings) for name, settings in points.items()}


def _remarks(setup: Setup) -> list[str]:
    return [] if setup["drafters"] else [on_demand.remark(setup)]


TOPS = (1, 2, 3, 5, 10)
TABLE = Experiment(
    speeds,
    COLUMNS,
    bars("over_plain", "acceptance_length", label="way"),
    QUICK
    | on_demand.OPTIONS
    | {"drafters": (*HEADS, SELF), "depth": DEPTH, "nodes": 16, "warm_per_set": 4, "paper_training": True},
)
ACCURACY = Experiment(
    accuracy,
    draft_accuracy.EXPERIMENT.columns,
    draft_accuracy.EXPERIMENT.plot,
    dict(draft_accuracy.EXPERIMENT.options)
    | on_demand.OPTIONS
    | {"drafters": HEADS, "early_exits": True, "exit_layers": (), "depth": DEPTH},
)
TRAINED: dict[str, Any] = dict(draft_accuracy.EXPERIMENT.options) | on_demand.OPTIONS | {"drafters": ()}
del TRAINED["depth"]  # these figures are of one transfer each
LAYER = Experiment(
    transfer_layer,
    ("layer", "top", "accuracy", "cases"),
    lines("layer", "accuracy", by="top"),
    TRAINED | {"layers": (), "first_layer": 0},
)
EXPERIMENTS = (
    *(replace(TABLE, run=partial(speeds, item=f"Table {n}")).of_paper(PAPER, f"Table {n}") for n in (1, 2, 3, 4, 5)),
    ACCURACY.of_paper(PAPER, "Figure 3"),
    pseudo_cosine.EXPERIMENT.of_paper(PAPER, "Figure 4"),
    LAYER.of_paper(PAPER, "Figure 5"),
    replace(LAYER, run=second_transfer_layer).of_paper(PAPER, "Figure 6"),
    replace(ACCURACY, run=masking, options=TRAINED).of_paper(PAPER, "Figure 7"),
)
