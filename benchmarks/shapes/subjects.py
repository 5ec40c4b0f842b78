"""What the experiments on tree sizes share: options, drafters, early heads, ways of decoding."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Setup, Way, on_demand
from benchmarks.harness.experiment import read
from draftree.drafting import Drafter
from draftree.pruning import EarlyHead
from draftree.runner import inspect_model
from draftree.shaping import Fixed

HEAD = "early-head"
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DRAFTERS = ("lookahead", "hidden-transfer", "medusa")
OPTIONS: dict[str, Any] = {"per_set": 4, "max_new_tokens": 96, "sets": (), "drafters": DRAFTERS, "warm_per_set": 8}


def fresh(setup: Setup, name: str) -> Drafter:
    """Return the drafter that tables call `name`, as it is before the first prompt."""
    return setup.drafter(setup.named[name])


def heads(setup: Setup) -> list[EarlyHead]:
    """Return the early heads that the option `early_heads` names; else those trained behind each of `early_layers`.

    The package's where neither says anything.
    """
    if not trains_heads(setup):
        return [setup.trained(name) for name in setup["early_heads"] or (HEAD,)]
    layers = [read("early_layers", layer, 0) for layer in setup["early_layers"]]
    count = len(inspect_model(setup.small).layers)
    if wrong := [layer for layer in layers if not 1 <= layer < count]:
        raise ValueError(f"There is no early head behind layer {wrong[0]}: this model has {count} layers.")
    return [on_demand.drafter(setup, HEAD, {"layer": layer, "rank": 0}) for layer in layers]


def trains_heads(setup: Setup) -> bool:
    """Return whether `heads` trains them."""
    return bool(setup.options.get("early_layers")) and not setup["early_heads"]


def batches(setup: Setup) -> list[int]:
    """Return the sizes of batches to measure; raise a ValueError for one that the prompts do not fill."""
    sizes, count = setup["batch"], len(setup.tasks)
    if max(sizes) > count:
        raise ValueError(
            f"{count} prompts fill no batch of {max(sizes)}: give more prompts, or --per-set, or smaller ones."
        )
    return list(sizes)


def static_ways(setup: Setup, name: str) -> list[Way]:
    """Return a drafter's ways by the option `sizes`; one that attaches rows also has a way with the root's alone."""
    ways = []
    for n in setup["sizes"]:
        drafter = fresh(setup, name)
        ways.append(Way(f"n={n}", drafter, Fixed(n)))
        if drafter.capabilities.prepares and drafter.rows(2) > 2:
            ways.append(Way(f"n={n}, root's rows", fresh(setup, name), Fixed(n, attach_to=1)))
    return ways
