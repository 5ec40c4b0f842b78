"""Decide when early pruning pays: the time of the early head against that of the pruned rows, as measured so far."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from draftree.runner.step_cost import StepCost
from draftree.runner.target import Target

HABIT = 0.95  # weight of the past in means
STAY_FIRST = 0.4  # share of draft tokens that stay, before any pass was pruned; the paper's trees keep 0.2 to 0.4
AGAIN = 64  # passes without pruning before one that measures again
DEAREST = 4.0  # the most that one measurement counts, in means


class Looks:
    """Measurements of pruned passes, over all engines of one pruner.

    Attributes:
        lock: guards changes.
        stay: share of the draft tokens that stay.
        cost: seconds of the early head over those of a pass of as many rows; 0 before the first engine.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stay = STAY_FIRST
        self.cost = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"stay": self.stay, "cost": self.cost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())


class Worth:
    """Decides for the passes of one engine.

    Args:
        looks: measurements of pruned passes.
        target: the model, which is pruned behind `layer` layers.
        layer: see there.
        cost: of its steps; None prunes every pass.
    """

    def __init__(self, looks: Looks, target: Target, layer: int, cost: StepCost | None) -> None:
        self._looks, self._cost = looks, cost
        self._share = layer / len(target.layers)  # of the layers, those before the pruning
        self._missed = 0  # passes since one was pruned
        with looks.lock:
            if not looks.cost:
                # A row costs this much in the head against all layers, until it has been measured.
                layers = sum(p.numel() for one in target.layers for p in one.parameters())
                looks.cost = target.hidden_size * target.vocab_size / max(layers, 1)

    def rows(self, rows: Any) -> Any:
        """Return the rows through all layers that a pruned pass of `rows` rows (a number or an array) amounts to."""
        pruned = rows * (self._share + (1 - self._share) * self._looks.stay + self._looks.cost)
        return pruned if self._cost is None else np.minimum(rows, pruned)

    def pays(self, rows: int) -> bool:
        """Return whether to prune a pass of `rows` rows; sometimes only to measure again."""
        if self._cost is None:
            return True
        full, rest = (float(seconds) for seconds in self._cost.of((rows, max(self._looks.stay * rows, 1.0))))
        if (1 - self._share) * (full - rest) > self._looks.cost * full:
            self._missed = 0
            return True
        self._missed += 1
        return self._missed % AGAIN == 0

    def note(self, share: float, seconds: float, rows: int) -> None:
        """Record the share of draft tokens that stayed, and the seconds of the early head."""
        with self._looks.lock:
            self._looks.stay += (1 - HABIT) * (share - self._looks.stay)
            if self._cost is not None:
                spent = min(seconds / float(self._cost.of(rows)), DEAREST * self._looks.cost)
                self._looks.cost += (1 - HABIT) * (spent - self._looks.cost)
