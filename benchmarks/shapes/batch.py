"""Dynamic trees and pruning by batch size; static trees of every size stand for an exhaustive search on this
machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, lines, measure, table_of
from benchmarks.harness.measure import all_differing, length, of, per_token, size, whole
from benchmarks.shapes.subjects import OPTIONS, SIZES, batches, fresh, heads, static_ways
from draftree.pruning import EarlyPruning
from draftree.shaping import DynamicTree, Fixed


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a second over plain decoding of the same batch, while it is full."""
    rows: list[dict[str, Any]] = []
    best_rows: list[dict[str, Any]] = []
    wrong = 0
    remark = (
        f"Every answer has {setup['max_new_tokens']} tokens; the clock runs while batches are full, until the first "
        "answer is complete. Prompts' passes are not in it (over_plain_to_the_last: whole answers)."
    )
    for name in setup.named:
        for batch in batches(setup):
            runs = measure(setup, _ways(setup, name), batch=batch, stop=False)
            wrong += all_differing(runs)
            plain = of(runs, PLAIN)
            ways = {str(way): of(runs, str(way)) for way in runs["way"].unique()}
            speeds = {way: per_token(plain) / per_token(own) for way, own in ways.items()}
            for way, own in ways.items():
                rows.append(
                    {"drafter": name, "batch": batch, "way": way}
                    | speeds[way].columns("over_plain")
                    | length(own).columns("acceptance_length")
                    | {"draft_tokens_a_step": size(own), "pruned": own["pruned"].sum() / max(own["drafted"].sum(), 1)}
                    | {"tokens_a_second": 1 / per_token(own).value}
                    | {"over_plain_to_the_last": (whole(plain) / whole(own)).value}
                )
            best = max((way for way in ways if way.startswith("n=")), key=lambda way: speeds[way].value)
            against = per_token(ways[best]) / per_token(ways["dynamic"])
            best_rows.append({"drafter": name, "batch": batch, "best_static": best})
            best_rows[-1] |= {"over_plain": speeds[best].value} | against.columns("dynamic_over_best")
            tables = {"The best static size": pd.DataFrame(best_rows)}
            yield table_of(rows, differing=wrong, remarks=[remark], tables=tables)


def _ways(setup: Setup, name: str) -> list[Way]:
    nodes = setup["nodes"]
    ways = [Way(PLAIN), *static_ways(setup, name)]
    ways.append(Way("static", fresh(setup, name), Fixed(nodes)))
    ways.append(Way("dynamic", fresh(setup, name), DynamicTree()))
    for head in heads(setup)[:1]:
        always = {"pruner": EarlyPruning(head, always=True)}
        ways.insert(-1, Way("static, pruned", fresh(setup, name), Fixed(nodes), always))
        ways.append(Way("dynamic, pruned", fresh(setup, name), DynamicTree(), {"pruner": EarlyPruning(head)}))
    return ways


EXPERIMENT = Experiment(
    run,
    ("drafter", "batch", "way", "over_plain", "acceptance_length", "draft_tokens_a_step", "pruned", "tokens_a_second"),
    lines("batch", "over_plain", by="way", panel="drafter", log=True),
    OPTIONS | {"nodes": 32, "sizes": SIZES, "batch": (1, 2, 4, 8, 16), "early_heads": ("early-head",)},
    name="batch",
)
