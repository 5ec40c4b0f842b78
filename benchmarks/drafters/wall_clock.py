"""What drafters inside the model bring in time: rows, step time, acceptance length and tokens a second.

Where a step with a tree takes r times a plain one and its acceptance length is l, decoding is l / r times as fast. So
small trees are looked at, with rows that the drafter attaches to all nodes and to the root alone, and the trees that
the engine sizes by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from benchmarks.drafters.subjects import IN_MODEL, OPTIONS, subjects
from benchmarks.harness import PLAIN, Experiment, Setup, Share, Way, table_of
from benchmarks.harness.measure import all_differing, differing, length, measure_parts, of, whole
from benchmarks.harness.plots import points
from benchmarks.harness.trees import Case, cases_of, with_tree
from draftree.bench.methods import HuggingFace
from draftree.drafting.in_model import BEST_FIRST, InModelDrafter
from draftree.shaping import DynamicTree, Fixed

HF, SIZED = "HF generate", "sized by cost"  # the last is the engine's own choice


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a second with small trees, and the rows, step time and acceptance length that make them."""
    chosen = [
        (name, drafter, case) for name, drafter in subjects(setup, *IN_MODEL).items() for case in cases(setup, drafter)
    ]
    ways = [Way(HF, ask=HuggingFace(HF, setup.model, setup["max_new_tokens"]).answers), Way(PLAIN)]
    for name, drafter, case in chosen:
        shape = DynamicTree() if case.label == SIZED else Fixed(case.nodes)
        ways.append(Way(_label(name, case), with_tree(drafter, case), shape))
    decoded: list[tuple[str, Case | None]] = [(PLAIN, None), *((name, case) for name, _, case in chosen)]
    for runs in measure_parts(setup, ways, rounds=setup["rounds"], ready=True):
        yield _summed_up(runs, decoded)


def _summed_up(runs: pd.DataFrame, decoded: Sequence[tuple[str, Case | None]]) -> pd.DataFrame:
    plain, hf = of(runs, PLAIN), of(runs, HF)
    rows: list[dict[str, Any]] = []
    by_set: list[dict[str, Any]] = []
    for name, one in decoded:
        way = PLAIN if one is None else _label(name, one)
        own = of(runs, way)
        step = Share(own["seconds"], own["passes"])
        rows.append(
            {"drafter": name, "tree": one and one.label, "nodes": one and one.nodes, "ahead": one and _ahead(one)}
            | {"rows": own["rows"].sum() / own["passes"].sum(), "step_ms": 1000 * step.value}
            | {"plain_steps": (step / Share(plain["seconds"], plain["passes"])).value}
            | {"tokens_a_step": length(own).value, "tokens_a_second": 1 / whole(own).value}
            | (whole(plain) / whole(own)).columns("over_plain")
            | (whole(hf) / whole(own)).columns("over_hf")
            | {"differing": differing(runs, way, reference=HF)}
        )
        for chosen_set in runs["set"].unique():
            mine, base, theirs = (of(runs, w, chosen_set) for w in (way, PLAIN, HF))
            ratios = [(whole(other) / whole(mine)).value for other in (base, theirs)]
            by_set.append({"drafter": name, "tree": rows[-1]["tree"], "set": chosen_set})
            by_set[-1] |= {"over_plain": ratios[0], "over_hf": ratios[1]}
    remark = f"HF generate: {1 / whole(hf).value:.0f} tokens/s."
    wrong = all_differing(runs, reference=HF)
    return table_of(rows, differing=wrong, remarks=[remark], tables={"Set by set": pd.DataFrame(by_set)})


def cases(setup: Setup, drafter: Any) -> list[Case]:
    """Trees of the engine's choice and of given sizes; where nodes look ahead, these with the root's rows alone too."""
    assert isinstance(drafter, InModelDrafter)
    groups = "groups" in drafter.settings
    sized = Case(BEST_FIRST, SIZED, None, drafter.max_nodes, drafter.settings.get("groups"))
    fixed = cases_of(drafter, (BEST_FIRST,), setup["nodes"], None)
    alone = [Case(c.kind, f"{c.label}, root alone", c.choices, c.nodes, 1) for c in fixed] if groups else []
    return [sized, *alone, *fixed]


def _ahead(case: Case) -> str:
    """Which nodes have rows of the drafter's own."""
    return "by cost" if case.label == SIZED else "all" if case.groups is None else "root"


def _label(name: str, case: Case) -> str:
    return f"{name}: {case.label}"


EXPERIMENT = Experiment(
    run,
    (
        *("drafter", "tree", "ahead", "rows", "step_ms", "plain_steps", "tokens_a_step", "tokens_a_second"),
        *("over_plain", "over_hf"),
    ),
    points("over_plain", label=("drafter", "tree")),
    OPTIONS | {"nodes": (1, 2, 4, 8), "rounds": 2},
    name="wall-clock",
)
