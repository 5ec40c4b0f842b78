"""Trees sized by what they bring and what they cost: n guesses where l(n) / T(n) is largest.

l(n) is the expected number of tokens of a step, 1 plus the path probabilities of the best n guesses; T(n) is the
measured time of a step with that many rows (ProPD, section 4.2). Drafters' own probabilities are over-confident, so
they are calibrated: guesses are binned by the drafter's path probability, and a bin's worth is how often its guesses
were in fact walked, recent steps counting more. Where nothing pays the tree is the root alone, and a small tree is
tried now and then to notice when that changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftree.host.cost import StepCost
from draftree.shaping.base import Shape
from draftree.tree import TokenTree

BINS = 24  # bins of path probability, two to a factor of e
FORGET = 0.98  # weight of a bin's past at each step that adds to it
PRIOR = 2.0  # how many observations the drafter's own probability counts for
PROBE_NODES = 4
PROBE_FIRST, PROBE_LAST = 8, 256  # steps between probes: doubling from the first to the last


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
        self._idle = 0  # steps since guesses were last tried
        self._patience = PROBE_FIRST

    def bind(self, cost: StepCost) -> None:
        """See `Shape.bind`."""
        if not self._own_cost:
            self._cost = cost

    def budgets(self, count: int, most: int) -> list[int]:
        """See `Shape.budgets`."""
        return [min(self.max_nodes, most)] * count

    def trim(self, trees: TokenTree) -> TokenTree:
        """See `Shape.trim`."""
        if trees.width == 1:
            return trees
        worth = self.path_probability(trees)
        sizes = self._choose(worth)
        if max(sizes) == 0:
            self._idle += 1
            if self._idle < self._patience:
                return trees.best(0)
            self._patience = min(2 * self._patience, PROBE_LAST)
            sizes = [PROBE_NODES] * trees.batch
        else:
            self._patience = PROBE_FIRST
        self._idle = 0
        if all(n >= size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
            return trees
        return trees.best(sizes)

    def path_probability(self, trees: TokenTree) -> np.ndarray:
        """Calibrated probability [B, N] that each node is walked; padding and roots get 0."""
        logp = trees.logp.numpy(force=True)
        worth = (self._walked / self._seen)[_bins(logp)]
        worth[:, 0] = 0.0
        worth[~np.isfinite(logp)] = 0.0
        return worth

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
        return (order >= flat[best - 1]).sum(1).tolist()

    def learn(self, trees: TokenTree, accepted: Sequence[Sequence[int]]) -> None:
        """See `Shape.learn`."""
        if trees.width == 1:
            return
        logp = trees.logp.numpy(force=True)
        walked = np.zeros(logp.shape, bool)
        for b, nodes in enumerate(accepted):
            walked[b, list(nodes)] = True
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
