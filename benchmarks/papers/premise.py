"""What all five papers build on: a pass over some rows takes hardly longer than one over a single row.

Lookahead (Figures 1 and 6), Hidden Transfer (Figure 1) and ProPD (Figure 3) show it for GPUs. Here passes are timed
over rows, context and batch on the machine and model at hand, this package's runner and Hugging Face's `forward` in
turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import Experiment, Setup, lines, table_of
from benchmarks.machine.steps import LOOP, check_context, time_rows
from draftree.checkpoints import free_bytes
from draftree.drafting.in_model import shapes_of
from draftree.runner import open_runner

FREE = (1.1, 1.5)  # times a pass of one row, below which rows count as free


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Milliseconds of a pass by its rows, context and batch, draftree's and Hugging Face's."""
    check(setup)
    rows, contexts, batches = (sorted(set(setup[name])) for name in ("rows", "context", "batch"))
    runner = open_runner(setup.model)
    found: list[dict[str, Any]] = []
    for batch in batches:
        for context in contexts:
            timed = {LOOP: (runner, rows)}
            steps = time_rows(setup.model, timed, context, setup["rounds"], setup.watcher, batch=batch)
            found += [{"batch": batch, "context": context} | row for row in steps.rows]
            table = pd.DataFrame(found)
            remarks = [f"Runner: {runner.form}. Each of a batch's texts has the context and so many rows."]
            yield table_of(found, remarks=remarks, tables={"What is free": _free(table)})


def check(setup: Setup) -> None:
    """Refuse passes that cannot be timed.

    Raises:
        ValueError: no pass of one row to compare with, no context or batch, more than the model has positions, or
            more keys and values than there is memory for.
    """
    if min(setup["rows"]) != 1 or min(setup["context"]) < 1 or min(setup["batch"]) < 1:
        raise ValueError(
            "Passes are compared with those of one row: give rows from 1 on, and positive contexts and batches."
        )
    check_context(max(setup["context"]), max(setup["rows"]), setup.small)
    target, shapes = setup.target, shapes_of(setup.target)
    a_token = shapes["layers"] * shapes["kv_heads"] * (shapes["head_dim"] + shapes["value_dim"]) * target.dtype.itemsize
    tokens = max(setup["batch"]) * (max(setup["context"]) + max(setup["rows"]))
    need, free = 2 * tokens * a_token, free_bytes(target.device)  # Hugging Face has a cache of its own
    if free is not None and need > free:
        held = f"{need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free"
        raise ValueError(f"Keys and values of {tokens} tokens take {held}: give a smaller batch or a shorter context.")


def _free(table: pd.DataFrame) -> pd.DataFrame:
    """How many rows a text take at most so much longer than one, and what each further row takes, as a share of it."""
    found = []
    for (batch, context, method), own in table.groupby(["batch", "context", "method"], sort=False):
        facts: dict[str, Any] = {"batch": batch, "context": context, "method": method}
        for times in FREE:
            facts[f"rows_below_{times}"] = int(own["rows"][own["over_one_row"] <= times].max())
        slope = np.polyfit(own["rows"], own["over_one_row"], 1)[0] if len(own) > 1 else 0.0
        found.append(facts | {"a_row_over_one_row": float(slope)})
    return pd.DataFrame(found)


PREMISE = Experiment(
    run,
    ("batch", "context", "method", "rows", "ms", "over_one_row"),
    lines("rows", "over_one_row", by=("method", "context"), panel="batch", log=True),
    {"rows": (1, 2, 4, 8, 16, 32, 64), "context": (128, 1024), "batch": (1, 4), "rounds": 5},
    name="premise",
)
_single: dict[str, Any] = {"batch": (1,), "context": (256, 512), "rounds": 3}
EXPERIMENTS = (
    PREMISE,
    PREMISE.of_paper("Lookahead", "Figure 1", **_single, rows=(1, 2, 4, 8, 16, 32, 64, 128, 256)),
    PREMISE.of_paper("Lookahead", "Figure 6", batch=(1, 4, 16), rows=(1, 5, 16, 32), rounds=3),
    PREMISE.of_paper("Hidden Transfer", "Figure 1", **_single),
)
