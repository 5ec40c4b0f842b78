"""`draftree bench propd step-cost`: what a step costs by its rows, here and on a GPU, and what the planner chooses.

The GPU's curve is a roofline of published figures, not a measurement: a step takes as long as reading the weights or as
the products of its rows, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from draftree.bench.analysis_setup import Findings, plain_axis
from draftree.bench.propd_runs import Way, batches, run_all
from draftree.bench.propd_setup import ProPDSetup
from draftree.drafting import Context
from draftree.runner import open_runner
from draftree.runner.step_cost import StepCost, measure_cost
from draftree.shaping import DynamicTree, Fixed
from draftree.shaping.calibration import Calibration
from draftree.tree import TokenTree

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
WARM = 50  # steps before guesses are kept
KEPT = 512  # requests' guesses that batches are drawn from
# Published: H100 SXM, 3.35 TB/s, 989 TFLOP/s in bf16 (dense), of which large products reach about 60 %; a 7B model.
GPU_NAME = "H100 SXM, 7B in bf16: roofline of published figures, not measured"
GPU_BYTES, GPU_FLOPS, WEIGHTS = 3.35e12, 0.6 * 989e12, 6.7e9
SECONDS = 2.0  # of measuring


class _Kept(Fixed):
    """Fixed trees; keeps what their guesses are worth."""

    def __init__(self, node_budget: int) -> None:
        super().__init__(node_budget)
        self._calibration = Calibration()
        self._steps = 0
        self.worth: list[np.ndarray] = []

    def trim(self, requests: Sequence[Context], trees: TokenTree) -> TokenTree:
        """See `Shape.trim`."""
        self._steps += 1
        worth = np.zeros((trees.batch, self.node_budget + 1))
        if trees.width > 1:
            worth[:, : trees.width] = self._calibration.worth(trees, requests)
            self._calibration.remember(requests, trees)
        if self._steps > WARM and len(self.worth) < KEPT:
            self.worth += list(worth)
        return trees

    def learn(self, requests: Sequence[Context], walks: Sequence[Sequence[int]], trees: TokenTree) -> None:
        """See `Shape.learn`."""
        self._calibration.compare(requests)


def gpu_curve(rows: Sequence[int] = (*ROWS, 256, 512, 1024, 2048, 4096)) -> StepCost:
    """The roofline of `GPU_NAME`."""
    read = 2 * WEIGHTS / GPU_BYTES
    return StepCost(rows, [max(read, 2 * WEIGHTS * n / GPU_FLOPS) for n in rows])


def step_cost(setup: ProPDSetup) -> Findings:
    """Both curves, and for every drafter and batch the sizes that pay by each of them."""
    runner = open_runner(setup.model)
    here = measure_cost(runner, SECONDS, ROWS)
    curves = {"here": here, "GPU": gpu_curve()}
    table = Table(
        "drafter", "curve", *(f"batch {b}" for b in BATCHES),
        title="Guesses a request that the planner chooses, and expected gain over plain steps", title_justify="left",
        caption=f"GPU: {GPU_NAME}",
    )  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"curve": name, "rows": c.rows.tolist(), "seconds": c.seconds.tolist()} for name, c in curves.items()
    ]
    generator = np.random.default_rng(0)
    for name in setup.drafters:
        shape = _Kept(setup.settings.nodes)
        setup.watcher.stage(name, batches(setup.tasks, 1, 1))
        drafter = setup.make(name)
        run_all(setup.model, [Way(name, drafter, shape)], setup.tasks, 1, setup.settings.max_new_tokens, setup.watcher)
        if not shape.worth:
            raise ValueError(f"{name!r} took fewer than {WARM} steps: measure more prompts, or longer answers.")
        kept = np.array(shape.worth)
        for curve, cost in curves.items():
            cells = []
            for batch in BATCHES:
                sizes, gains = _chosen(drafter, cost, kept, batch, generator)
                cells.append(f"{sizes:.1f} ({gains:.2f}x)")
                rows.append({"drafter": name, "curve": curve, "batch": batch, "guesses": sizes, "expected": gains})
            table.add_row(name, curve, *cells)
        table.add_section()
    steps = Table("rows", *map(str, ROWS), title="A step against one of one row", title_justify="left")
    for name, cost in curves.items():
        steps.add_row(name, *(f"{float(cost.of(n) / cost.of(1)):.2f}" for n in ROWS))

    def draw(figure: Any) -> None:
        left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
        for name, cost in curves.items():
            left.plot(ROWS, cost.of(ROWS) / cost.of(1), "o-", label=name)
        left.set_xscale("log", base=2)
        left.set_yscale("log", base=2)
        left.legend(fontsize=8, frameon=False)
        plain_axis(left, "Step time, one row = 1", "rows", "")
        for name in setup.drafters:
            for curve, style in (("here", "o-"), ("GPU", "s--")):
                own = [r["guesses"] for r in rows if r.get("drafter") == name and r["curve"] == curve]
                right.plot(BATCHES, own, style, label=f"{name}, {curve}")
        right.set_xscale("log", base=2)
        right.legend(fontsize=7, frameon=False)
        plain_axis(right, "Guesses a request", "batch", "")

    return Findings(rows, [steps, table], draw, (9.5, 4.2), {}, [f"GPU curve: {GPU_NAME}."])


def _chosen(
    drafter: Any, cost: StepCost, kept: np.ndarray, batch: int, generator: np.random.Generator
) -> tuple[float, float]:
    """Mean guesses a request, and expected tokens for the time of plain steps, over batches drawn from `kept`."""
    shape = DynamicTree(cost=cost)
    shape.bind(cost, drafter, packed=False)
    planner = shape.planner
    guesses = tokens = seconds = 0.0
    times = 40
    for _ in range(times):
        worth = kept[generator.integers(0, len(kept), batch)]
        choice = planner.best(worth, attached=planner.attaching is not None)
        guesses += sum(choice.sizes) / batch
        tokens += sum(choice.gains)
        seconds += choice.seconds
    return guesses / times, tokens / seconds * planner.plain(batch) / batch
