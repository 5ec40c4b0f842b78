"""What a step costs by its rows, here and on a GPU, and the sizes of trees that would pay.

The GPU's curve is a roofline of published figures, not a measurement: a step takes as long as reading the weights or as
the products of its rows, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import Experiment, Setup, Way, lines, measure, table_of
from benchmarks.harness.acceptance_models import MODELS, judge
from benchmarks.shapes.subjects import OPTIONS, fresh
from draftree.drafting import Drafter
from draftree.engine import Recorder
from draftree.runner import open_runner
from draftree.runner.step_cost import StepCost, measure_cost
from draftree.shaping import Fixed
from draftree.shaping.planner import choose

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
KEPT, DRAWN = 512, 40  # recorded trees that batches are drawn from, and how many batches
# Published: H100 SXM, 3.35 TB/s, 989 TFLOP/s in bf16 (dense), of which large products reach about 60 %; a 7B model.
GPU_NAME = "H100 SXM, 7B in bf16: roofline of published figures, not measured"
MEASURED, ASSUMED = "here", "H100 roofline, not measured"  # the curves, as tables and the picture name them
GPU_BYTES, GPU_FLOPS, WEIGHTS = 3.35e12, 0.6 * 989e12, 6.7e9


def gpu_curve(rows: Sequence[int] = (*ROWS, 256, 512, 1024, 2048, 4096)) -> StepCost:
    """The roofline of `GPU_NAME`."""
    read = 2 * WEIGHTS / GPU_BYTES
    return StepCost(rows, [max(read, 2 * WEIGHTS * n / GPU_FLOPS) for n in rows])


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Draft tokens a request that pay by each curve, and the gain over plain steps, by drafter and batch."""
    curves = {MEASURED: measure_cost(open_runner(setup.model), ROWS), ASSUMED: gpu_curve()}
    over = [{"curve": name} | {f"rows_{n}": float(c.of(n) / c.of(1)) for n in ROWS} for name, c in curves.items()]
    tables = {"A step against one of one row": pd.DataFrame(over)}
    generator = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for name in setup.named:
        recorder, drafter = Recorder(), fresh(setup, name)
        ways = [Way(name, drafter, Fixed(setup["nodes"]), {"recorder": recorder})]
        measure(setup, ways)
        kept = worths(recorder, setup["nodes"], setup["burn_in"])
        if not len(kept):
            steps = f"{setup['burn_in']} steps"
            raise ValueError(f"{name!r} took fewer than {steps}: measure more prompts or longer answers.")
        for curve, cost in curves.items():
            for batch in BATCHES:
                drawn = [kept[generator.integers(0, len(kept), batch)] for _ in range(DRAWN)]
                size, gain = chosen(cost, drawn, drafter)
                facts = {"drafter": name, "curve": curve, "batch": batch}
                rows.append(facts | {"draft_tokens": size, "expected_gain": gain})
        yield table_of(rows, remarks=[f"{ASSUMED}: {GPU_NAME}."], tables=tables)


def worths(recorder: Recorder, nodes: int, burn_in: int) -> np.ndarray:
    """[trees, 1 + nodes], calibrated probabilities of recorded trees' nodes, after the first steps."""
    kept: list[np.ndarray] = []
    for number, step in enumerate(judge(recorder)):
        if number >= burn_in and len(kept) < KEPT:
            own = step.worth.get(MODELS[0], np.zeros(1))
            kept.append(np.pad(own, (0, nodes + 1 - len(own))))
    return np.array(kept)


def chosen(cost: StepCost, batches: Sequence[np.ndarray], drafter: Drafter) -> tuple[float, float]:
    """Mean draft tokens a request, and expected tokens for the time of plain steps, over some batches."""
    batch, most = batches[0].shape
    seconds = cost.of(drafter.rows(np.arange(batch, batch * most + 1), batch))
    sizes, tokens, spent = 0, 0.0, 0.0
    for worth in batches:
        chances = [sorted((p for p in own if p > 0), reverse=True) for own in worth.tolist()]
        taken = choose(chances, seconds.tolist(), packed=True)
        sizes += sum(taken)
        tokens += batch + sum(sum(own[:size]) for own, size in zip(chances, taken, strict=True))
        spent += float(seconds[sum(taken)])
    return sizes / len(batches) / batch, tokens / spent * float(cost.of(batch)) / batch


EXPERIMENT = Experiment(
    run,
    ("drafter", "curve", "batch", "draft_tokens", "expected_gain"),
    lines("batch", "draft_tokens", "expected_gain", by=("drafter", "curve"), log=True),
    OPTIONS | {"nodes": 32, "burn_in": 50},
    name="step-cost",
)
