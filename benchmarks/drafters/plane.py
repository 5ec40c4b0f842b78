"""What a drafter's trees bring against what they cost: acceptance length and the time to verify.

Every drafter, each pair of drafters and all of them together verify equally many draft tokens in every step. A row's
speed over plain decoding would be its length over its time if nothing but the pass took time; what drafting costs is
the difference to the speed that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Share, Way, table_of
from benchmarks.harness.measure import all_differing, length, measure_parts, of, per_token
from benchmarks.harness.plots import colours
from draftree.bench.pictures import plain_axis
from draftree.drafting import Merge
from draftree.shaping import Fixed


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Acceptance length and time of a pass with as many draft tokens from each drafter, each pair, and all."""
    names = list(setup.named)
    groups = [(name,) for name in names] + list(combinations(names, 2)) + ([tuple(names)] if len(names) > 2 else [])
    ways = [Way(PLAIN)]
    for group in groups:
        drafters = [setup.drafter(setup.named[name]) for name in group]
        drafter = drafters[0] if len(group) == 1 else Merge(drafters)
        ways.append(Way(" + ".join(group), drafter, Fixed(setup["nodes"])))
    for runs in measure_parts(setup, ways, ready=True):
        plain, rows = of(runs, PLAIN), []
        for way, group in zip(ways[1:], groups, strict=True):
            own = of(runs, way.name)
            verify = Share(own["verify"], own["steps"]) / Share(plain["verify"], plain["steps"])
            row = {"drafters": way.name, "sources": len(group)} | length(own).columns("tokens_a_step")
            row |= {"time": verify.value, "by_pass_alone": length(own).value / verify.value}
            rows.append(row | (per_token(plain) / per_token(own)).columns("over_plain"))
        yield table_of(rows, differing=all_differing(runs))


def plot(figure: Any, table: pd.DataFrame) -> None:
    """Named points over the line where decoding is as fast as plain."""
    figure.set_size_inches(9, 6)
    axis = figure.add_subplot()
    axis.scatter(table["time"], table["tokens_a_step"], color=colours(table))
    for _, row in table.iterrows():
        axis.annotate(row["drafters"], (row["time"], row["tokens_a_step"]), fontsize=7)
    reach = [1.0, float(table[["time", "tokens_a_step"]].to_numpy().max())]
    axis.plot(reach, reach, color="0.5", linestyle=":")
    plain_axis(axis, "", "time to verify a step, plain steps", "tokens a step")


EXPERIMENT = Experiment(
    run,
    ("drafters", "tokens_a_step", "time", "by_pass_alone", "over_plain"),
    plot,
    {"per_set": 1, "max_new_tokens": 96, "sets": (), "warm_per_set": 8, "nodes": 8}
    | {"drafters": ("lookahead", "draft-model", "medusa", "hidden-transfer", "bita")},
    name="plane",
)
