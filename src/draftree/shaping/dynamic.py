"""Trees sized by what they bring and what they cost: n guesses where l(n) / T(n) is largest.

l(n) is the expected number of tokens of a step, 1 plus the path probabilities of the best n guesses; T(n) is the
measured time of a step with that many rows (ProPD, section 4.2). Drafters' own probabilities are over-confident, so
they are calibrated (`Calibration`). Where no guess of a step pays, its tree is the root alone; where that happens
many times in a row the drafter is not even asked for a while, since asking costs too; the first guess that turns
out right ends that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftree.drafting.base import Context
from draftree.host.cost import StepCost
from draftree.shaping.base import Shape
from draftree.shaping.calibration import Calibration
from draftree.tree import TokenTree

FRUITLESS = 8  # steps in a row without a guess worth verifying after which the drafter rests
CLOCK_EVERY = 4  # steps between two that the cost curve learns from
RECENT = 0.98  # how fast the largest tree of late fades, per step
ASK_FACTOR, ASK_LEAST = 1.5, 8  # guesses asked for: this times the largest of late, and some
REST_FIRST, REST_LAST = 4, 32  # steps of rest, doubling from the first to the last


class DynamicTree(Shape):
    """Sizes every step's trees by calibrated path probabilities and the measured cost of a step.

    Args:
        max_nodes: most guesses per request.
        cost: what a step costs; by default the engine's own measurement.
    """

    def __init__(self, max_nodes: int = 64, cost: StepCost | None = None) -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is {max_nodes}: give 1 or more, or use no drafter at all.")
        self.max_nodes = max_nodes
        self.calibration = Calibration()
        self._cost = cost
        self._own_cost = cost is not None
        self._clocked = 0
        self._fruitless = 0  # steps in a row that drafted nothing worth verifying
        self._recent = float(max_nodes)  # most guesses verified of late, fading
        self._rest = 0  # steps still to go without asking the drafter
        self._next_rest = REST_FIRST

    def bind(self, cost: StepCost) -> None:
        """See `Shape.bind`."""
        if not self._own_cost:
            self._cost = cost

    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """See `Shape.budgets`."""
        if self._rest > 0:
            self._rest -= 1
            return [0] * len(requests)
        # Beyond a multiple of what was verified of late, guesses would be drafted only to be cut off again.
        return [min(self.max_nodes, most, int(ASK_FACTOR * self._recent) + ASK_LEAST)] * len(requests)

    def trim(self, requests: Sequence[Context], trees: TokenTree) -> TokenTree:
        """See `Shape.trim`."""
        sizes = [0] * trees.batch
        if trees.width > 1:
            self.calibration.remember(requests, trees)
            sizes = self.choose(self.calibration.worth(trees))
            if trees.batch == 1:
                sizes[0] |= sizes[0] > 0  # with its root an even number of rows, which costs no more than one less
        self._count(fruitful=max(sizes) > 0)
        self._recent = max(max(sizes), RECENT * self._recent)
        if all(n >= size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
            return trees
        return trees.best(sizes)

    def _count(self, *, fruitful: bool) -> None:
        if fruitful:
            self._fruitless, self._next_rest = 0, REST_FIRST
            return
        self._fruitless += 1
        if self._fruitless >= FRUITLESS:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, REST_LAST)
            self._fruitless = FRUITLESS - 1  # one more fruitless step is enough to rest again

    def choose(self, worth: np.ndarray) -> list[int]:
        """Guesses per request: the best n of the whole batch, n where l(n) / T(n) is largest.

        Args:
            worth: [B, N], probability that each guess is walked; 0 for roots and padding.
        """
        assert self._cost is not None
        batch = worth.shape[0]
        if batch == 1:
            flat = np.sort(worth[0])[::-1][: self.max_nodes]
            return [int((np.append(1.0, 1.0 + flat.cumsum()) / self._cost.table(1, len(flat) + 2)).argmax())]
        order = np.sort(worth, axis=1)[:, ::-1][:, : self.max_nodes]
        flat = np.sort(order, axis=None)[::-1]
        flat = flat[flat > 0]
        gain = batch + np.concatenate([[0.0], np.cumsum(flat)])
        rate = gain / self._cost.table(batch, batch + len(gain))
        best = int(rate.argmax())
        if best == 0:
            return [0] * batch
        least = flat[best - 1]
        sizes, ties = (order > least).sum(1), (order == least).sum(1)
        left = best - int(sizes.sum())  # of equals, which binning makes many, the first requests' are taken
        return (sizes + np.clip(left - (ties.cumsum() - ties), 0, ties)).tolist()

    def clock(self, rows: int, seconds: float) -> None:
        """See `Shape.clock`."""
        self._clocked += 1
        if self._cost is not None and not self._own_cost and self._clocked % CLOCK_EVERY == 0:
            self._cost.observe(rows, seconds)

    def learn(self, requests: Sequence[Context]) -> None:
        """See `Shape.learn`."""
        if self.calibration.compare(requests):  # whether or not it was worth a row: the drafter has something to say
            self._fruitless, self._rest, self._next_rest = 0, 0, REST_FIRST

    def end(self, request: Context) -> None:
        """See `Shape.end`."""
        self.calibration.forget(request)
