"""When early pruning pays: what looking takes, against what the rows that leave would have taken.

Both are as found in the passes so far, so that a pass is pruned where that is expected to make it shorter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftree.runner.step_cost import StepCost
from draftree.runner.target import Target

HABIT = 0.95  # weight of the past in what pruned passes were like
STAY_FIRST = 0.4  # share of draft tokens that stay, before any pass was pruned; the paper's trees keep 0.2 to 0.4
AGAIN = 64  # passes that could have been pruned after which one is, to see whether it pays by now
DEAREST = 4.0  # times the expected, as a single look counts


class Worth:
    """What pruned passes were like.

    Args:
        always: prune every pass, whether or not it pays.

    Attributes:
        passes: how many passes were pruned.
    """

    def __init__(self, *, always: bool) -> None:
        self.always = always
        self.passes = 0
        self._cost: StepCost | None = None
        self._share = 0.0  # of the layers, those before the pruning
        self._stay = STAY_FIRST
        self._look = 0.0  # seconds of looking, against those of a pass of as many rows
        self._missed = 0

    def bind(self, target: Target, layer: int, cost: StepCost | None) -> None:
        """Meet the model, which is pruned behind `layer` layers, and what its steps cost; None prunes every pass."""
        self._cost = cost
        self._share = layer / len(target.layers)
        if not self._look:
            # A row costs this much in the head against all layers, until it has been measured.
            layers = sum(p.numel() for layer in target.layers for p in layer.parameters())
            self._look = target.hidden_size * target.vocab_size / max(layers, 1)

    def rows(self, rows: Any) -> Any:
        """Rows through all layers that a pass of `rows` rows (a number or an array) amounts to when it is pruned."""
        pruned = rows * (self._share + (1 - self._share) * self._stay + self._look)
        return pruned if self.always else np.minimum(rows, pruned)

    def pays(self, rows: int) -> bool:
        """Whether to prune a pass of `rows` rows; now and then to find out."""
        if self.always or self._cost is None:
            return True
        full, rest = (float(seconds) for seconds in self._cost.of((rows, max(self._stay * rows, 1.0))))
        if (1 - self._share) * (full - rest) > self._look * full:
            self._missed = 0
            return True
        self._missed += 1
        return self._missed % AGAIN == 0

    def note(self, share: float, seconds: float, rows: int) -> None:
        """In a pass of `rows` rows this share of the draft tokens stayed, and looking took `seconds`."""
        self.passes += 1
        self._stay += (1 - HABIT) * (share - self._stay)
        if self._cost is not None:
            spent = min(seconds / float(self._cost.of(rows)), DEAREST * self._look)
            self._look += (1 - HABIT) * (spent - self._look)
