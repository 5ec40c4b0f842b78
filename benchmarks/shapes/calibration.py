"""Expected against real acceptance lengths, for every model of acceptance.

Every recorded step's tree is judged by all models before its text is known, and each then learns from it. Trees have a
fixed size and are the drafter's own, so that no model chooses what it is judged by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Share, Way, measure, points, table_of
from benchmarks.harness.acceptance_models import MODELS, judge
from benchmarks.harness.measure import all_differing
from benchmarks.shapes.subjects import DRAFTERS, OPTIONS, fresh
from draftree.engine import Recorder
from draftree.shaping import Fixed

COLUMNS = {name: name.replace("'s", "s").replace(" ", "_").replace("-", "_") + "_over_real" for name in MODELS}


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Expected over real acceptance length, model by model, after each drafter's first steps."""
    rows: list[dict[str, Any]] = []
    wrong = 0
    remark = f"The first {setup['burn_in']} steps of each drafter do not count."
    names = list(setup.named)
    plain = measure(setup, [Way(PLAIN)])
    for name in names:
        for nodes in sorted({4, setup["nodes"]}):
            recorder = Recorder()
            ways = [Way(name, fresh(setup, name), Fixed(nodes), {"recorder": recorder})]
            wrong += all_differing(measure(setup, ways), plain)
            sums = summed(recorder, len(setup.tasks), setup["burn_in"])
            real = Share(sums["real"], sums["steps"])
            facts = {"drafter": name, "draft_tokens": nodes} | real.columns("acceptance_length")
            for model, column in COLUMNS.items():
                facts |= Share(sums[model], sums["real"]).columns(column)
            rows.append(facts)
            yield table_of(rows, differing=wrong, remarks=[remark])


def summed(recorder: Recorder, requests: int, burn_in: int) -> dict[str, np.ndarray]:
    """By request: tokens that came, steps, and the tokens that each model had expected of them."""
    sums = {name: np.zeros(requests) for name in ("real", "steps", *MODELS)}
    for number, step in enumerate(judge(recorder)):
        if number < burn_in or step.last:  # an answer's last step may have been cut off
            continue
        sums["real"][step.request] += step.emitted
        sums["steps"][step.request] += 1
        for model in MODELS:
            sums[model][step.request] += step.expected(model)
    return sums


EXPERIMENT = Experiment(
    run,
    ("drafter", "draft_tokens", "acceptance_length", *COLUMNS.values()),
    points(COLUMNS[MODELS[0]], label=("drafter", "draft_tokens")),
    OPTIONS | {"drafters": ("lookahead", "prompt-lookup", "bita", *DRAFTERS[1:]), "nodes": 32, "burn_in": 50},
    name="calibration",
    source="ProPD, section 4.2",
)
