"""Draft accuracy: how often the truth is among a drafter's best k tokens, by depth (Hidden Transfer, Figure 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from benchmarks.drafters.subjects import IN_MODEL, OPTIONS, subjects
from benchmarks.harness import Experiment, Setup, lines, table_of
from benchmarks.harness.comparisons import CLAIMED, rows_of
from benchmarks.harness.truth import RANKS, Hits, measured_hits

SHOWN_RANKS = (1, 2, 3, 5, 10)
METHODS = (*IN_MODEL, "early-head")
Claims = Callable[[dict[str, Hits]], Sequence[tuple[str, str, str, str, Any]]]  # from hits by drafter, see `rows_of`


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Share of cases with the truth among the best k draft tokens; N places after the newest token."""
    yield from compared(setup, subjects(setup, *METHODS))


def compared(
    setup: Setup, found: dict[str, Any], more: Sequence[str] = (), claims: Claims | None = None
) -> Iterator[pd.DataFrame]:
    """The same of these drafters, with `more` remarks, and the `claims` that what was counted can speak of."""
    rows: list[dict[str, Any]] = []
    seen: dict[str, Hits] = {}
    wide: list[dict[str, Any]] = []
    sets = [task.prompt.set for task in setup.tasks]
    for name, hits in measured_hits(setup, found):
        seen[name] = hits
        for d, place in enumerate(hits.places):
            cases = int(hits.cases[:, d].sum())
            if not cases:
                continue
            facts = {"drafter": name, "method": found[name].method, "place": place, "cases": cases}
            tops = {k: hits.top(d, k) for k in range(1, RANKS + 1)}
            for k, share in tops.items():
                own = pd.DataFrame({"set": sets, "right": share.over, "cases": share.under}).groupby("set").sum()
                by_set = (own["right"] / own["cases"]).dropna().to_dict()
                rows.append(facts | {"top": k} | share.columns("accuracy") | {"by_set": by_set})
            wide.append(facts | tops[1].columns("top_1") | {f"top_{k}": tops[k].value for k in SHOWN_RANKS[1:]})
        remark = "N = 1 is what the model itself says next, which an early head drafts too."
        remarks = [*more, *([remark] if any(row["place"] == 1 for row in rows) else [])]
        tables = {"By depth": pd.DataFrame(wide)}
        if claims is not None and (claimed := claims(seen)):
            tables[CLAIMED] = rows_of(claimed)
        yield table_of(rows, remarks=remarks, tables=tables)


EXPERIMENT = Experiment(
    run,
    ("drafter", "place", "cases", "top", "accuracy"),
    lines("top", "accuracy", by="drafter", panel="place"),
    OPTIONS | {"drafters": METHODS},
    name="draft-accuracy",
    source="Hidden Transfer, Figure 3",
)
