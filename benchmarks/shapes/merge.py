"""Several drafters under one budget against each of them alone, at equal budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, lines, measure, table_of
from benchmarks.harness.measure import all_differing, length, of
from benchmarks.shapes.subjects import OPTIONS, fresh
from draftree.drafting import Merge
from draftree.shaping import Fixed


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Acceptance lengths of the first drafter merged with each other one, in all and set by set."""
    names = list(setup.named)
    if len(names) < 2:
        raise ValueError("merge needs two drafters or more: add --drafter once for each.")
    rows: list[dict[str, Any]] = []
    by_set: list[dict[str, Any]] = []
    wrong = 0
    pairs = {f"{names[0]} + {name}": (names[0], name) for name in names[1:]}
    truth = measure(setup, [Way(PLAIN)])
    for budget in setup["nodes"]:
        ways = [Way(name, fresh(setup, name), Fixed(budget)) for name in names]
        for label, pair in pairs.items():
            ways.append(Way(label, Merge([fresh(setup, name) for name in pair]), Fixed(budget)))
        runs = measure(setup, ways)
        wrong += all_differing(runs, truth)
        for label, pair in pairs.items():
            own = {name: length(of(runs, name)) for name in (label, *pair)}
            best = max(pair, key=lambda name: own[name].value)
            below = []
            for one in setup.sets:
                here = {name: length(of(runs, name, one)) for name in (label, *pair)}
                better = max(pair, key=lambda name: here[name].value)
                below += [one] if (here[label] / here[better]).interval[1] < 1.0 else []
                alone = [here[name].value for name in pair]
                by_set.append({"drafters": label, "nodes": budget, "set": one, "merged": here[label].value})
                by_set[-1] |= {"first_alone": alone[0], "second_alone": alone[1]}
            rows.append(
                {"drafters": label, "nodes": budget}
                | {"first_alone": own[pair[0]].value, "second_alone": own[pair[1]].value}
                | own[label].columns("merged")
                | (own[label] / own[best]).columns("over_the_better_alone")
                | {"sets_below_by_more_than_the_interval": ", ".join(below) or "none"}
            )
        yield table_of(rows, differing=wrong, tables={"Set by set": pd.DataFrame(by_set)})


EXPERIMENT = Experiment(
    run,
    (
        *("drafters", "nodes", "first_alone", "second_alone", "merged", "over_the_better_alone"),
        "sets_below_by_more_than_the_interval",
    ),
    lines("nodes", "merged", by="drafters"),
    OPTIONS | {"drafters": ("lookahead", "hidden-transfer", "bita"), "nodes": (4, 8, 16)},
    name="merge",
)
