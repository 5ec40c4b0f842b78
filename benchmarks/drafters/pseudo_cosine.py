"""Cosine similarity of pseudo and real hidden states, layer by layer (Hidden Transfer, Figure 4).

A pseudo state of step i enters at layer t_i and passes the layers that are left; i tokens later the real state at its
position is there to compare with. As a yardstick stands the similarity of the node's own state with that real state:
what a pseudo state would have if it were a plain copy in every layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.drafters.subjects import OPTIONS, subjects
from benchmarks.harness import Experiment, Setup, Share, lines, table_of
from benchmarks.harness.comparisons import CLAIMED, rows_of
from benchmarks.harness.truth import Onlooker, look_on
from draftree.drafting import HiddenTransfer
from draftree.drafting.base import Step

Pseudo = dict[tuple[int, int], Tensor]  # by step i and layer


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Similarity of every step's pseudo states, and of the node's own, with the real ones, by layer."""
    rows, claimed = list[dict[str, Any]](), list[tuple[str, str, str, str, Share]]()
    for name, drafter in subjects(setup, "hidden-transfer").items():
        setup.watcher.stage(f"states of {name}", len(setup.tasks))
        found = _similarities(setup, drafter)
        for i in sorted({i for i, _ in found}):
            first, *_, last = (layer for step, layer in found if step == i)
            near = [Share(found[i, layer][0], found[i, layer][2]) for layer in (last, first)]
            what = f"cosine similarity, step {i} of {name}"
            claimed.append(("hidden-transfer-cosine", f"layer {last}", f"layer {first}", what, near[0] / near[1]))
        for (i, layer), sums in found.items():
            facts = {"drafter": name, "step": i, "layer": layer, "cases": int(sums[2].sum())}
            rows.append(facts | Share(sums[0], sums[2]).columns("pseudo") | Share(sums[1], sums[2]).columns("own"))
        yield table_of(rows, tables={CLAIMED: rows_of(claimed)})


def _similarities(setup: Setup, drafter: Any) -> dict[tuple[int, int], np.ndarray]:
    """By (step i, layer): per prompt the summed similarity of pseudo states, of nodes' own, and the cases [3, T]."""
    assert isinstance(drafter, HiddenTransfer)
    steps, last = drafter.transfer_layers[: drafter.depth], len(setup.target.layers)
    layers = range(steps[0], last + 1)
    waiting: dict[int, dict[int, tuple[Pseudo, dict[int, Tensor]]]] = defaultdict(dict)  # request, place
    noted: list[tuple[int, int, int, float, float]] = []  # request, step i, layer, similarities

    def see(step: Step) -> None:
        rows = {layer: _rows_at(step, layer) for layer in layers}
        for b, emitted in enumerate(step.emitted):
            if not emitted:
                continue
            request = step.requests[b]
            newest, held = len(request.tokens) - len(emitted) - 1, waiting[request.id]
            real = {layer: step.result.hidden[layer][b, step.offset].float() for layer in layers}
            for i in range(1, len(steps) + 1):
                pseudo, own = held.get(newest - i, ({}, {}))
                for (j, layer), state in pseudo.items():
                    if j == i:
                        pair = torch.stack([state, own[layer]])
                        near = F.cosine_similarity(pair, real[layer][None], -1).tolist()
                        noted.append((request.id, i, layer, near[0], near[1]))
            held.pop(newest - len(steps), None)
            if step.own_rows and len(step.result.segments) > 1:
                made = {}
                for i, first in enumerate(steps, 1):
                    for layer in range(first, last + 1):
                        row = rows[layer][b].index(step.offset + i)  # after the root, in the order of the steps
                        made[i, layer] = step.result.hidden[layer][b, row].float()
                held[newest] = (made, real)

    prompts = [task.ids for task in setup.tasks]
    texts = look_on(setup, prompts, Onlooker(see, drafter, layers, setup.watcher.step))
    sums: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros((3, len(prompts))))
    for request, i, layer, near, own in noted:
        sums[i, layer][:, texts[request][0]] += (near, own, 1)
    return dict(sorted(sums.items()))


def _rows_at(step: Step, layer: int) -> list[list[int]]:
    """Per request, the numbers of the rows that stand in a layer's hidden states."""
    segment = [s for s in step.result.segments if s.start <= layer][-1]
    if segment.rows is None:
        return [list(range(segment.positions.shape[1]))] * len(step.requests)
    return segment.rows.tolist()


EXPERIMENT = Experiment(
    run,
    ("drafter", "step", "layer", "cases", "pseudo", "own"),
    lines("layer", "pseudo", "own", by=("drafter", "step")),
    OPTIONS | {"drafters": ("hidden-transfer",)},
    name="pseudo-cosine",
    source="Hidden Transfer, Figure 4",
)
