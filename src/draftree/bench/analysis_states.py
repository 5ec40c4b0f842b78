"""Cosine similarity of pseudo and real hidden states, layer by layer (Hidden Transfer, Figure 4).

A pseudo state of step i enters at layer t_i and passes the layers that are left; i tokens later the real state at its
position is there to compare with. As a yardstick stands the similarity of the node's own state with that real state:
what a pseudo state would have if it were a plain copy in every layer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from draftree.bench.analysis_guesses import look_on
from draftree.bench.analysis_setup import Findings, Sampled, Setup, Subject, bounds, plain_axis
from draftree.bench.summary import Estimate, shown
from draftree.drafting.base import Step
from draftree.drafting.hidden_transfer import HiddenTransfer
from draftree.tuning.onlooker import Onlooker

Scores = dict[tuple[str, int, int], tuple[Estimate, Estimate]]  # drafter, step i, layer: pseudo state, node's own
Pseudo = dict[tuple[int, int], Tensor]  # by step i and layer


def pseudo_cosine(setup: Setup) -> Findings:
    """Similarity of every step's pseudo states with the real ones, from their transfer layer to the last."""
    scores: Scores = {}
    rows = []
    for subject in setup.subjects:
        setup.watcher.stage(f"states of {subject.name}", len(setup.tasks))
        for (i, layer), (pseudo, own, cases) in _similarities(setup, subject).items():
            found = tuple(Sampled.share(sums, cases).estimate for sums in (pseudo, own))
            scores[subject.name, i, layer] = (found[0], found[1])
            rows.append(
                {"drafter": subject.name, "method": subject.method, "step": i, "layer": layer}
                | {"cases": int(cases.sum()), "cosine": found[0].as_dict(), "own_state": found[1].as_dict()}
            )
    names = list(dict.fromkeys(name for name, _, _ in scores))
    return Findings(rows, [_table(scores)], lambda figure: _draw(figure, scores, names), (5.2 * len(names) + 2, 4.2))


def _similarities(setup: Setup, subject: Subject) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By (step i, layer): per prompt [T] the summed similarity of pseudo states and of nodes' own, and the cases."""
    drafter = subject.trained
    assert isinstance(drafter, HiddenTransfer)
    steps = drafter.transfer_layers[: drafter.depth]
    last = len(setup.target.layers)
    layers = range(steps[0], last + 1)
    waiting: dict[int, dict[int, tuple[Pseudo, dict[int, Tensor]]]] = defaultdict(dict)  # request, place
    nothing: tuple[Pseudo, dict[int, Tensor]] = ({}, {})
    noted: list[tuple[int, int, int, float, float]] = []  # request, step i, layer, similarities

    def see(step: Step) -> None:
        rows = {layer: _rows_at(step, layer) for layer in layers}
        for b, emitted in enumerate(step.emitted):
            if not emitted:
                continue
            request = step.requests[b]
            newest = len(request.tokens) - len(emitted) - 1
            held = waiting[request.id]
            real = {layer: step.result.hidden[layer][b, step.offset].float() for layer in layers}
            for i, first in enumerate(steps, 1):
                pseudo, own = held.get(newest - i, nothing)
                for layer in range(first, last + 1):
                    if (i, layer) in pseudo:
                        pair = torch.stack([pseudo[i, layer], own[layer]])
                        near = F.cosine_similarity(pair, real[layer][None], -1).tolist()
                        noted.append((request.id, i, layer, near[0], near[1]))
            held.pop(newest - len(steps), None)
            if step.own_rows and len(step.result.segments) > 1:
                pseudo = {}
                for i, first in enumerate(steps, 1):
                    for layer in range(first, last + 1):
                        row = rows[layer][b].index(step.offset + i)  # behind the root, in the order of the steps
                        pseudo[i, layer] = step.result.hidden[layer][b, row].float()
                held[newest] = (pseudo, real)

    prompts = [task.ids for task in setup.tasks]
    texts = look_on(setup, prompts, Onlooker(see, drafter, layers, setup.watcher.step))
    sums: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros((3, len(prompts))))
    for request, i, layer, near, own in noted:
        sums[i, layer][:, texts[request][0]] += (near, own, 1)
    return {key: (parts[0], parts[1], parts[2]) for key, parts in sorted(sums.items())}


def _rows_at(step: Step, layer: int) -> list[list[int]]:
    """Per request, the numbers of the rows that stand in a layer's hidden states."""
    segment = [s for s in step.result.segments if s.start <= layer][-1]
    if segment.rows is None:
        return [list(range(segment.positions.shape[1]))] * len(step.requests)
    rows: list[list[int]] = segment.rows.tolist()
    return rows


def _table(scores: Scores) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Cosine similarity with the real state, by layer whose output is compared",
        title_justify="left",
        title_style="bold",
        caption="In brackets: 95 % bootstrap over prompts. Own: the node's own state against that real state.",
        caption_justify="left",
    )
    table.add_column("drafter")
    for heading in ("step", "layer", "pseudo", "own"):
        table.add_column(heading, justify="right")
    before: tuple[str, int] | None = None
    for (name, i, layer), (pseudo, own) in scores.items():
        if before is not None and before != (name, i):
            table.add_section()
        head = ("" if before and before[0] == name else name, "" if before == (name, i) else str(i))
        table.add_row(*head, str(layer), shown(pseudo, "{:.3f}"), shown(own, "{:.3f}"))
        before = (name, i)
    return table


def _draw(figure: Any, scores: Scores, names: list[str]) -> None:
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axis, name in zip(panels, names, strict=True):
        for i in sorted({i for n, i, _ in scores if n == name}):
            layers = [layer for n, j, layer in scores if (n, j) == (name, i)]
            pairs = [scores[name, i, layer] for layer in layers]
            axis.plot(layers, [p.value for p, _ in pairs], color=f"C{i - 1}", marker="o", label=f"step {i}, pseudo")
            axis.plot(layers, [o.value for _, o in pairs], color=f"C{i - 1}", linestyle=":", label=f"step {i}, own")
            lows, highs = zip(*(bounds(p) for p, _ in pairs), strict=True)
            axis.fill_between(layers, lows, highs, color=f"C{i - 1}", alpha=0.15, linewidth=0)
            axis.set_xticks(range(min(layer for n, _, layer in scores if n == name), layers[-1] + 1))
        plain_axis(axis, name, "output of layer", "cosine similarity with the real state" if axis is panels[0] else "")
        axis.legend(frameon=False, fontsize=8)
