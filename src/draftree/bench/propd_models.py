"""`draftree bench propd calibration`: expected against real acceptance lengths, for every model of acceptance.

Every step's tree is judged by all models before its text is known, and each then learns from it. Trees have a fixed
size and are the drafter's own, so that no model chooses what it is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from draftree.bench.analysis_setup import Findings, Sampled, bounds, plain_axis
from draftree.bench.propd_runs import Way, batches, differing, run_all
from draftree.bench.propd_setup import PLAIN, ProPDSetup
from draftree.bench.summary import shown
from draftree.drafting import Context
from draftree.shaping import Fixed
from draftree.shaping.by_rank import ByRank
from draftree.shaping.calibration import Calibration
from draftree.tree import TokenTree

MODELS = ("calibrated", "by-rank", "product", "the drafter's own")
BURN_IN = 50  # steps of a drafter before the comparison begins


class Judged(Fixed):
    """Fixed trees, each judged by every model; sums per request, in the order in which requests come."""

    def __init__(self, node_budget: int, spawn: int | None = None) -> None:
        super().__init__(node_budget, spawn)
        self._models: dict[str, Calibration | ByRank]
        self._models = {"calibrated": Calibration(), "by-rank": ByRank(), "product": ByRank(conditional=False)}
        self._steps = 0
        self._waiting: dict[int, dict[str, float]] = {}
        self.expected: dict[str, list[float]] = {name: [] for name in MODELS}
        self.real: list[float] = []
        self.steps: list[int] = []
        self._place: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def trim(self, requests: Sequence[Context], trees: TokenTree) -> TokenTree:
        """See `Shape.trim`."""
        self._steps += 1
        if trees.width > 1:
            sums = {name: model.worth(trees, requests).sum(1) for name, model in self._models.items()}
            own = np.exp(trees.logp.numpy(force=True))
            sums[MODELS[-1]] = np.where(trees.parents.numpy(force=True) >= 0, own, 0.0).sum(1)
            for model in self._models.values():
                model.remember(requests, trees)
            if self._steps > BURN_IN:
                for b, request in enumerate(requests):
                    self._waiting[request.id] = {name: 1 + float(values[b]) for name, values in sums.items()}
        elif self._steps > BURN_IN:
            for request in requests:
                self._waiting[request.id] = dict.fromkeys(MODELS, 1.0)
        self._lengths = {request.id: len(request.tokens) for request in requests}
        return trees

    def learn(self, requests: Sequence[Context], walks: Sequence[Sequence[int]], trees: TokenTree) -> None:
        """See `Shape.learn`."""
        for model in self._models.values():
            model.compare(requests)
        for request in requests:
            expected = self._waiting.pop(request.id, None)
            if expected is None or request.room <= 0:  # an answer's last step may have been cut off
                continue
            place = self._place.setdefault(request.id, len(self.real))
            if place == len(self.real):
                self.real.append(0.0)
                self.steps.append(0)
                for sums in self.expected.values():
                    sums.append(0.0)
            self.real[place] += len(request.tokens) - self._lengths[request.id]
            self.steps[place] += 1
            for name, value in expected.items():
                self.expected[name][place] += value

    def end(self, request: Context) -> None:
        """See `Shape.end`."""
        for model in self._models.values():
            model.forget(request)
        self._waiting.pop(request.id, None)


def calibration(setup: ProPDSetup) -> Findings:
    """Expected over real acceptance length, drafter by drafter."""
    table = Table(
        "drafter",
        "guesses",
        "acceptance length",
        *(f"{name} / real" for name in MODELS),
        title="Expected acceptance length against the real one",
        title_justify="left",
    )
    rows: list[dict[str, Any]] = []
    wrong = 0
    settings = setup.settings
    plain = run_all(setup.model, [Way(PLAIN)], setup.tasks, 1, settings.max_new_tokens, setup.watcher)
    for name in setup.drafters:
        for nodes in sorted({4, settings.nodes}):
            shape = Judged(nodes)
            setup.watcher.stage(f"{name}, {nodes} guesses", batches(setup.tasks, 1, 1))
            ways = [Way(name, setup.make(name), shape)]
            runs = run_all(setup.model, ways, setup.tasks, 1, settings.max_new_tokens, setup.watcher)
            wrong += differing(plain | runs, PLAIN)
            real = np.array(shape.real)
            length = Sampled.share(real, np.array(shape.steps))
            ratios = {m: Sampled.share(np.array(shape.expected[m]), real) for m in MODELS}
            rows.append(
                {"drafter": name, "nodes": nodes, "acceptance_length": [length.value, *bounds(length.estimate)]}
                | {m: [ratio.value, *bounds(ratio.estimate)] for m, ratio in ratios.items()}
            )
            table.add_row(
                name,
                str(nodes),
                shown(length.estimate, "{:.2f}"),
                *(shown(ratio.estimate, "{:.3f}") for ratio in ratios.values()),
            )

    def draw(figure: Any) -> None:
        axis = figure.add_subplot()
        for number, model in enumerate(MODELS):
            for place, row in enumerate(rows):
                value, low, high = row[model]
                axis.errorbar(
                    value, place + 0.15 * (number - 1.5), xerr=[[value - low], [high - value]], fmt="o",
                    color=f"C{number}", markersize=4, label=model if place == 0 else None,
                )  # fmt: skip
        axis.axvspan(0.97, 1.03, color="0.9")
        axis.axvline(1.0, color="0.6", linewidth=0.8)
        axis.set_yticks(range(len(rows)), [f"{r['drafter']}, {r['nodes']}" for r in rows])
        axis.invert_yaxis()
        axis.legend(fontsize=8, frameon=False)
        plain_axis(axis, "Expected over real acceptance length", "ratio; grey: within 3 %", "")

    remarks = [f"Steps behind each drafter's first {BURN_IN}. Differing answers: {wrong}."]
    return Findings(rows, [table], draw, (7.5, 1.4 + 0.6 * len(rows)), {"differing": wrong}, remarks)
