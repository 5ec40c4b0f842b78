"""Where a step's time goes, by the engine's own clock: draft, shape, verify, accept, commit, and what lies between.

Answers are given plainly and with a warm trie whose trees have a fixed size; of every step with exactly so many rows
the recorded times are read. The quicker nine tenths count: some steps are stalled by what else the machine does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby, pairwise
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
    """Rows and seconds by part of every recorded step of a request but its first, which reads the prompt, and last."""
    steps = (record for record in recorder.records() if record["kind"] == "step")
    found = []
    for _, own in groupby(steps, lambda step: step["members"][0]["request"]):
        next(own)  # reads the prompt
        for step, later in pairwise(own):
            whole, shape = later["at"] - step["at"], step["shape_seconds"]
            facts = {"rows": len(step["members"][0]["tokens"]), **step["seconds"], "shape": shape, "whole": whole}
            rest = whole - sum(step["seconds"].values())
            found.append(facts | {"draft": facts["draft"] - shape, "rest": rest})
    return found


EXPERIMENT = Experiment(
    run,
    ("rows", "steps", *PARTS, "whole"),
    bars(*PARTS[:3], "whole", label="rows", mark=None),
    {"per_set": 1, "max_new_tokens": 48, "sets": (), "warm_per_set": 8, "rows": (1, 8, 16)},
    name="step-stages",
)
