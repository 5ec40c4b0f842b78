"""Trees sized by what they bring and what they cost: n guesses where l(n) / T(n) is largest.

l(n) is the expected number of tokens of a step, 1 plus the path probabilities of the best n guesses; T(n) is the
measured time of a step with that many rows (ProPD, section 4.2). Drafters' own probabilities are over-confident, so
they are calibrated: guesses are binned by the drafter's path probability, and a bin's worth is how often its guesses
were in fact walked, recent steps counting more. Where no guess of a step pays, its tree is the root alone; where
guesses keep failing, the drafter is not even asked for a while (asking costs too), and a small tree is tried ever
more rarely to notice when that changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftree.host.cost import StepCost
from draftree.shaping.base import Shape
from draftree.tree import TokenTree

BINS = 24  # bins of path probability, two to a factor of e
FORGET = 0.98  # weight of a bin's past at each guess that adds to it
PRIOR = 2.0  # how many observations the drafter's own probability counts for
PROBE_NODES = 4
FRUITLESS = 8  # steps in a row without an accepted guess after which the drafter rests
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
        self._cost = cost
        self._own_cost = cost is not None
        centre = np.exp(-(np.arange(BINS) + 0.5) / 2)
        self._walked = PRIOR * centre
        self._seen = np.full(BINS, PRIOR)
        self._fruitless = 0  # steps in a row that brought no accepted guess
        self._rest = 0  # steps still to go without asking the drafter
        self._next_rest = REST_FIRST
        self._probing = False

    def bind(self, cost: StepCost) -> None:
        """See `Shape.bind`."""
        if not self._own_cost:
            self._cost = cost

    def budgets(self, count: int, most: int) -> list[int]:
        """See `Shape.budgets`."""
        if self._rest > 0:
            self._rest -= 1
            return [0] * count
        return [min(self.max_nodes, most)] * count

    def trim(self, trees: TokenTree) -> TokenTree:
        """See `Shape.trim`."""
        if trees.width == 1:
            self._count_failure()
            return trees
        sizes = self._choose(self.path_probability(trees))
        if max(sizes) == 0:
            if not self._probing:
                self._count_failure()
                return trees.best(0)
            sizes = [PROBE_NODES] * trees.batch
        self._probing = False
        if all(n >= size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
            return trees
        return trees.best(sizes)

    def _count_failure(self) -> None:
        self._fruitless += 1
        if self._fruitless >= FRUITLESS:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, REST_LAST)
            self._probing = True
            self._fruitless = FRUITLESS - 1  # one failed probe is enough to rest again

    def path_probability(self, trees: TokenTree) -> np.ndarray:
        """Calibrated probability [B, N] that each node is walked; padding and roots get 0."""
        logp = trees.logp.numpy(force=True)
        worth = self._rates()[_bins(logp)]
        worth[:, 0] = 0.0
        worth[~np.isfinite(logp)] = 0.0
        return worth

    def _rates(self) -> np.ndarray:
        """How often a bin's guesses are walked, never rising from bin to bin: trees are cut in the drafter's order."""
        rates = self._walked / self._seen
        return (np.minimum.accumulate(rates) + np.maximum.accumulate(rates[::-1])[::-1]) / 2

    def _choose(self, worth: np.ndarray) -> list[int]:
        """Guesses per request: the best n of the whole batch by worth, n where l(n) / T(n) is largest."""
        assert self._cost is not None
        batch = worth.shape[0]
        order = np.sort(worth, axis=1)[:, ::-1][:, : self.max_nodes]
        flat = np.sort(order, axis=None)[::-1]
        flat = flat[flat > 0]
        gain = batch + np.concatenate([[0.0], np.cumsum(flat)])
        rate = gain / self._cost.of(batch + np.arange(len(gain)))
        best = int(rate.argmax())
        if best == 0:
            return [0] * batch
        least = flat[best - 1]
        sizes, ties = (order > least).sum(1), (order == least).sum(1)
        left = best - int(sizes.sum())  # of equals, which binning makes many, the first requests' are taken
        return (sizes + np.clip(left - (ties.cumsum() - ties), 0, ties)).tolist()

    def learn(self, trees: TokenTree, accepted: Sequence[Sequence[int]]) -> None:
        """See `Shape.learn`."""
        if trees.width == 1:
            return
        logp = trees.logp.numpy(force=True)
        walked = np.zeros(logp.shape, bool)
        for b, nodes in enumerate(accepted):
            walked[b, list(nodes)] = True
        if any(len(nodes) > 1 for nodes in accepted):
            self._fruitless, self._next_rest = 0, REST_FIRST
        else:
            self._count_failure()
        real = np.isfinite(logp)
        real[:, 0] = False
        bins = _bins(logp[real])
        seen = np.bincount(bins, minlength=BINS)
        hits = np.bincount(bins[walked[real]], minlength=BINS)
        keep = np.where(seen > 0, FORGET**seen, 1.0)
        self._seen = keep * self._seen + seen
        self._walked = keep * self._walked + hits


def _bins(logp: np.ndarray) -> np.ndarray:
    finite = np.where(np.isfinite(logp), logp, -float(BINS))
    return np.clip((-2 * finite).astype(np.int64), 0, BINS - 1)
