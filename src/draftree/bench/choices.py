"""Which draft tokens of a batch would pay, given what each is worth and what rows cost: ProPD's rule, tokens a second.

It answers "what if" for batches and machines that are not here. The engine's own shape learns while it runs; nothing of
it is asked here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftree.drafting import Drafter
from draftree.runner.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest choice for one step of a batch.

    Attributes:
        sizes: [B], draft tokens of each request.
        tokens: expected of all requests together.
        seconds: of the step.
    """

    sizes: np.ndarray
    tokens: float
    seconds: float


def best_sizes(cost: StepCost, worth: np.ndarray, *, packed: bool = True, drafter: Drafter | None = None) -> Best:
    """The draft tokens that bring most tokens a second; none where plain decoding does.

    Args:
        cost: of a step by its rows.
        worth: [B, N], probability that each draft token is accepted; 0 for the root and where there is none.
        packed: whether only real rows cost; else the trees of a batch are padded to the largest.
        drafter: attaches rows of its own; None for one that attaches none.
    """
    batch = len(worth)
    ranked = -np.sort(-worth, axis=1)
    most = int((ranked > 0).sum())
    best = Best(np.zeros(batch, int), float(batch), float(cost.of(batch)))
    if packed:
        floors = -np.sort(-ranked[ranked > 0])
        takes = [(ranked > 0) & (ranked >= floor) for floor in np.unique(floors)[::-1]]
    else:
        takes = [(ranked > 0) & (np.arange(ranked.shape[1]) < n) for n in range(1, most + 1)]
    for take in takes:
        sizes = take.sum(1)
        nodes = batch + int(sizes.sum() if packed else batch * sizes.max())
        rows = nodes if drafter is None else drafter.rows(nodes, batch)
        tokens, seconds = batch + float(ranked[take].sum()), float(cost.of(rows))
        if tokens / seconds > best.tokens / best.seconds:
            best = Best(sizes, tokens, seconds)
    return best
