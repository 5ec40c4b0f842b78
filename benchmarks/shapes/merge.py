"""Several drafters under one budget against each of them alone: at equal budgets, and with trees sized by cost.

At equal budgets the acceptance length says what a second drafter adds. Trees sized by cost say whether that is worth
its time, also on sets that it knows nothing of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, measure, points, table_of
from benchmarks.harness.measure import all_differing, length, of, whole
from benchmarks.shapes.subjects import OPTIONS, fresh
from draftree.drafting import Merge
from draftree.shaping import DynamicTree, Fixed

SIZED = "by cost"


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Acceptance length and speed of the first drafter merged with each other one, in all and set by set."""
    names = list(setup.named)
    if len(names) < 2:
        raise ValueError("merge needs two drafters or more: add --drafter once for each.")
    rows: list[dict[str, Any]] = []
    by_set: list[dict[str, Any]] = []
    wrong = 0
    pairs = {f"{names[0]} + {name}": (names[0], name) for name in names[1:]}
    truth = measure(setup, [Way(PLAIN)])
    for nodes in [*setup["nodes"], SIZED]:
        made = [(name, fresh(setup, name)) for name in names]
        made += [(label, Merge([fresh(setup, name) for name in pair])) for label, pair in pairs.items()]
        ways = [Way(name, drafter, DynamicTree() if nodes == SIZED else Fixed(nodes)) for name, drafter in made]
        runs = measure(setup, ways, ready=True)
        wrong += all_differing(runs, truth)
        for label, pair in pairs.items():
            here = {"drafters": label, "nodes": nodes}
            parts = [here | {"set": one} | _compared(runs, label, pair, one) for one in setup.sets]
            by_set += parts
            ends = [(part["set"], part["over_the_first_high"]) for part in parts]  # None where a set has one prompt
            slower = [one for one, high in ends if high is not None and high < 1.0]
            rows.append(here | _compared(runs, label, pair) | {"slower_sets": ", ".join(slower) or "none"})
        yield table_of(rows, differing=wrong, tables={"Set by set": pd.DataFrame(by_set)})


def _compared(runs: pd.DataFrame, label: str, pair: Sequence[str], one_set: str | None = None) -> dict[str, Any]:
    """Return a merge beside its two drafters, on all prompts or those of one set: acceptance lengths, and its speed."""
    owns = {name: of(runs, name, one_set) for name in (label, *pair)}
    lengths = {name: length(own) for name, own in owns.items()}
    better = max(pair, key=lambda name: lengths[name].value)
    return (
        {"first_alone": lengths[pair[0]].value, "second_alone": lengths[pair[1]].value}
        | {"merged": lengths[label].value}
        | (lengths[label] / lengths[better]).columns("length_over_the_better")
        | (whole(owns[pair[0]]) / whole(owns[label])).columns("over_the_first")
    )


EXPERIMENT = Experiment(
    run,
    (
        *("drafters", "nodes", "first_alone", "second_alone", "merged"),
        *("length_over_the_better", "over_the_first", "slower_sets"),
    ),
    points("over_the_first", label=("drafters", "nodes")),
    OPTIONS | {"drafters": ("lookahead", "hidden-transfer", "bita"), "nodes": (4, 8, 16)},
    name="merge",
)
