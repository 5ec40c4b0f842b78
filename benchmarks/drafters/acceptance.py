"""Acceptance length of drafters inside the model with every kind of tree at equal budgets, from real decoding runs.

Estimates from recorded candidates are biased, as trees stop where text is hard; so every row here comes from answers
that were decoded with that tree, one request at a time, all of them compared with plain decoding's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from benchmarks.drafters.subjects import IN_MODEL, OPTIONS, subjects
from benchmarks.harness import PLAIN, Experiment, Setup, Share, Way, lines, table_of, trees
from benchmarks.harness.measure import all_differing, differing, length, measure_parts, of
from benchmarks.harness.truth import hits_of
from draftree.drafting.folder import Trained
from draftree.drafting.in_model import InModelDrafter
from draftree.shaping import Fixed

Lengths = dict[tuple[str, str], Share]  # by drafter and tree
Chosen = tuple[str, InModelDrafter, trees.Case]


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a step of every drafter with every kind of tree, at its largest within each budget."""
    found = subjects(setup, *IN_MODEL)
    for table, lengths in measured(setup, found, setup["trees"]):
        relations = relate(table, lengths, setup["nodes"], found)
        if len(relations):
            table.attrs["tables"] = {"Ratios of acceptance lengths within the same budget": relations}
        yield table


def measured(setup: Setup, found: dict[str, Trained], kinds: Any) -> Iterator[tuple[pd.DataFrame, Lengths]]:
    """A row for each drafter and tree so far; and the acceptance lengths by both, for ratios.

    Raises:
        ValueError: an unknown kind, or no prompts to search choice lists on.
    """
    kinds = trees.checked_kinds(kinds)
    chosen: list[Chosen] = []
    for name, drafter in found.items():
        assert isinstance(drafter, InModelDrafter)
        shares = None
        if trees.SEARCHED in kinds:
            if not setup.lessons:
                raise ValueError(
                    "There are no prompts but the measured ones to search choice lists on: give more prompts, or "
                    f"name the other kinds by --set trees=, {trees.SEARCHED!r} not among them."
                )
            setup.watcher.stage(f"search for trees of {name}", len(setup.lessons))
            shares = hits_of(setup, drafter, setup.lessons).by_rank
        cases = trees.cases_of(drafter, kinds, setup["nodes"], shares)
        if not cases:
            raise ValueError(
                f"No tree of {name!r} fits {max(setup['nodes'])} draft tokens: give --nodes {drafter.depth} or more."
            )
        chosen += [(name, drafter, case) for case in cases]
    ways = [Way(PLAIN)]
    ways += [Way(f"{name}: {c.label}", trees.with_tree(drafter, c), Fixed(c.nodes)) for name, drafter, c in chosen]
    for runs in measure_parts(setup, ways):
        yield _summed_up(runs, chosen)


def _summed_up(runs: pd.DataFrame, chosen: Sequence[Chosen]) -> tuple[pd.DataFrame, Lengths]:
    plain, rows = of(runs, PLAIN), []
    lengths: Lengths = {}
    for name, drafter, case in chosen:
        way = f"{name}: {case.label}"
        own = of(runs, way)
        lengths[name, case.label] = length(own)
        step = Share(own["seconds"], own["passes"])
        rows.append(
            {"drafter": name, "method": drafter.method, "kind": case.kind, "tree": case.label, "nodes": case.nodes}
            | lengths[name, case.label].columns("acceptance_length")
            | {"rows_a_step": own["rows"].sum() / own["passes"].sum(), "ms_a_step": 1000 * step.value}
            | {"step_over_plain": (step / Share(plain["seconds"], plain["passes"])).value}
            | {"differing": differing(runs, way)}
        )
    return table_of(rows, differing=all_differing(runs)), lengths


def relate(table: pd.DataFrame, lengths: Any, budgets: Any, found: dict[str, Trained]) -> pd.DataFrame:
    """The ratios that the papers report, as far as there is something to compare.

    The best tree of a side is the one with the longest measured acceptance within the budget, on these prompts.
    """
    rows: list[dict[str, Any]] = []

    def best(name: str, budget: int, *kinds: str) -> tuple[str, str] | None:
        own = table[(table["drafter"] == name) & (table["nodes"] <= budget)]
        own = own[own["kind"].isin(kinds)] if kinds else own
        return None if own.empty else (name, own.loc[own["acceptance_length"].idxmax(), "tree"])

    def compare(what: str, budget: int, above: Any, below: Any) -> None:
        if above is not None and below is not None:
            facts = {"ratio": what, "nodes": budget, "above": ", ".join(above), "below": ", ".join(below)}
            rows.append(facts | (lengths[above] / lengths[below]).columns("times"))

    for budget in sorted(set(budgets)):
        for name, one in found.items():
            for other, base in found.items():
                if base.method == "medusa" != one.method:
                    compare("over Medusa", budget, best(name, budget), best(other, budget))
                if _masks_only(base) and not _masks_only(one) and one.settings.get("masks") == base.settings["masks"]:
                    prompts = one.settings["prompting"]
                    compare(f"{prompts} prompts over masks only", budget, best(name, budget), best(other, budget))
            own = best(name, budget, trees.EFFICIENT, trees.EFFICIENT_CODE)
            compare("efficient over best full", budget, own, best(name, budget, trees.FULL))
            compare("efficient over straightforward", budget, own, best(name, budget, trees.STRAIGHTFORWARD))
    return pd.DataFrame(rows)


def _masks_only(drafter: Trained) -> bool:
    return drafter.method == "bita" and drafter.settings["prompts"] == 0


EXPERIMENT = Experiment(
    run,
    ("drafter", "tree", "nodes", "acceptance_length", "rows_a_step", "ms_a_step", "step_over_plain"),
    lines("nodes", "acceptance_length", by="kind", panel="drafter"),
    OPTIONS | {"nodes": (4, 8, 16, 32), "trees": (), "warm_per_set": 4},
    name="acceptance",
)
