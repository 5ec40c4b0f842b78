"""Where a step's time goes, by the engine's own clock: draft, shape, verify, accept, commit, and what lies between.

Answers are given plainly and with a warm trie whose trees have a fixed size; of every step with exactly so many rows
the recorded times are read. The quicker nine tenths count: some steps are stalled by what else the machine does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.harness import Experiment, Setup, Way, bars, measure, table_of
from draftree.engine import Recorder
from draftree.shaping import Fixed

PARTS = ("draft", "shape", "verify", "accept", "commit", "rest")
KEPT = 0.9


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Microseconds of a step by stage, for steps of several numbers of rows."""
    rows: list[dict[str, Any]] = []
    for count in setup["rows"]:
        recorder = Recorder()
        drafter, shape = (setup.trie(), Fixed(count - 1)) if count > 1 else (None, None)
        way = Way(str(count), drafter, shape, {"recorder": recorder})
        measure(setup, [way])
        steps = [step for step in timed(recorder) if step["rows"] == count]
        quick = sorted(steps, key=lambda step: step["whole"])[: math.ceil(KEPT * len(steps))]
        if quick:
            means = pd.DataFrame(quick)[[*PARTS, "whole"]].mean() * 1e6
            rows.append({"rows": count, "steps": len(steps)} | means.to_dict())
            yield table_of(rows)


def timed(recorder: Recorder) -> list[dict[str, float]]:
    """Rows and seconds by part of every recorded step of one request, its prompt's left out."""
    found, before = [], None
    for record in recorder.records():
        if record["kind"] != "step":
            continue
        request, stages = record["members"][0]["request"], record["seconds"]
        if before is not None and before["request"] == request:
            found.append(before["facts"] | {"whole": record["at"] - before["at"]})
            found[-1]["rest"] = found[-1]["whole"] - sum(before["stages"].values())
        facts = {"rows": len(record["members"][0]["tokens"]), **stages, "shape": record["shape_seconds"]}
        facts["draft"] -= facts["shape"]
        read = before is not None and before["request"] == request  # the first step of a request reads its prompt
        before = {"request": request, "at": record["at"], "stages": stages, "facts": facts | {"prompt": not read}}
    return [step for step in found if not step.pop("prompt")]


EXPERIMENT = Experiment(
    "step-stages",
    "",
    run,
    ("rows", "steps", *PARTS, "whole"),
    bars(*PARTS[:3], "whole", label="rows", mark=None),
    {"per_set": 1, "max_new_tokens": 48, "sets": (), "warm_per_set": 8, "rows": (1, 8, 16)},
)
