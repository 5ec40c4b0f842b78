"""Trees sized by what they bring and what they cost: n guesses where l(n) / T(n) is largest.

l(n) is the expected number of tokens of a step, 1 plus the path probabilities of the best n guesses; T(n) is the
measured time of a step with that many rows (ProPD, section 4.2). Drafters' own probabilities are over-confident, so
they are calibrated (`Calibration`). Where no guess of a step pays, its tree is the root alone.

Asking costs too. Whether the drafter is asked at all is decided by the balance of the last steps: tokens hoped for
against seconds spent, the drafter's own work included, both in units of a plain step. Where it stays negative the
drafter rests for a while, longer each time, and is tried again.

A drafter inside the model pays for its guesses one step ahead: with rows that it attaches to every node of the tree,
and with the time it takes to read and arrange what they say. Both count in T, as found in the steps so far. The step
that goes to rest still verifies what was guessed, at plain cost. Rows of a node are wasted unless the walk ends there:
only so many nodes get some as are worth it, by the chance of that, by what guesses brought of late, and by T.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from draftree.drafting.base import Context, Drafter
from draftree.host.cost import StepCost
from draftree.shaping.base import Shape
from draftree.shaping.calibration import Calibration
from draftree.tree import TokenTree

FRUITLESS = 4  # steps in a row with a negative balance after which the drafter rests
CLOCK_EVERY = 16  # steps between two that the cost curve learns from
RECENT = 0.98  # how fast the largest tree of late fades, per step
ASK_FACTOR, ASK_LEAST = 1.5, 8  # guesses asked for: this times the largest of late, and some
REST_FIRST, REST_LAST = 8, 64  # steps of rest, doubling from the first to the last
BALANCE = 0.85  # weight of the past in the balance
ASIDE = 1.2  # a drafter's work in a step, against that of guessing alone
HABIT = 0.9  # weight of the past in what its steps were found to take
DEAREST = 4.0  # times the expected, as a single step counts
GROUPS_FIRST, PRIZE_FIRST = 1.0, 0.5  # nodes of a tree with rows, and what guesses are worth, before it is known
LEFT = 0.5  # of that worth, what the rows of a node further up still bring
WORTH = 0.95  # weight of the past in how many nodes have rows, and in what guesses are found to be worth


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
        self._fruitless = 0  # steps in a row with a negative balance
        self._recent = float(max_nodes)  # most guesses verified of late, fading
        self._rest = 0  # steps still to go without asking the drafter
        self._next_rest = REST_FIRST
        self._preparing: Drafter | None = None  # the drafter, if it prepares its guesses in the pass before
        self._dearer = 1.0  # a pass with its rows, against a plain one of as many
        self._usual = 1.0  # a plain pass, against what the curve says of it; that learns more slowly
        self._aside = 0.0  # seconds of its own work in a step
        self._timed = 0  # steps that these two are learned from
        self._mark = self._drafting = 0.0  # when drafting or observing began; how long drafting took
        self._spawns = False  # whether it attaches rows to nodes, so that their number can be chosen
        self._spawned = 0  # nodes of the coming step that have rows attached
        self._groups = 0.0  # such nodes of a tree, of late
        self._prize = PRIZE_FIRST  # tokens that guesses add to a step, less what those would cost otherwise
        # By batch and spawning nodes of a tree: rows of passes over `batch` nodes and more.
        self._numbers: dict[tuple[int, int], np.ndarray] = {}
        self._carried = 0  # requests of the coming step, if the drafter prepares the next one in it
        self._hoped = self._spent = 0.0

    def bind(self, cost: StepCost, drafter: Drafter | None = None) -> None:
        """See `Shape.bind`."""
        if not self._own_cost:
            self._cost = cost
        self._preparing = drafter if drafter is not None and drafter.prepares else None
        self._spawns = self._preparing is not None and self._preparing.rows(8, 1, 1) != self._preparing.rows(8, 1, 8)
        self._groups = self._groups or GROUPS_FIRST
        self._numbers.clear()

    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """See `Shape.budgets`."""
        if self._rest > 0:
            self._rest -= 1
            self._tell(requests, resting=self._rest > 0)
            return [0] * len(requests)
        self._tell(requests, resting=False)
        self._mark = time.perf_counter()
        # Beyond a multiple of what was verified of late, guesses would be drafted only to be cut off again.
        return [min(self.max_nodes, most, int(ASK_FACTOR * self._recent) + ASK_LEAST)] * len(requests)

    def _tell(self, requests: Sequence[Context], *, resting: bool) -> None:
        for request in requests:
            request.resting = resting
        self._carried = 0 if resting or self._preparing is None else len(requests)

    def trim(self, requests: Sequence[Context], trees: TokenTree) -> TokenTree:
        """See `Shape.trim`."""
        sizes = [0] * trees.batch
        self._drafting = time.perf_counter() - self._mark
        if trees.width > 1:
            self.calibration.remember(requests, trees, always=self._hoped <= self._spent)
            sizes = self._weigh(requests, self.calibration.worth(trees))
            if trees.batch == 1 and self._preparing is None:
                sizes[0] |= sizes[0] > 0  # with its root an even number of rows, which costs no more than one less
        elif self._preparing is None:
            self._balance(1.0, 1.0)  # asked, and nothing known
        self._recent = max(max(sizes), RECENT * self._recent)
        if any(n < size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
            trees = trees.best(sizes)
        if self._spawns and self._carried:
            count = self._spawning(trees) if trees.width > 1 else 1
            self._groups += (1 - WORTH) * (count - self._groups)
            self._spawned = trees.batch * count
            for request in requests:
                request.spawn = count
        return trees

    def _spawning(self, trees: TokenTree) -> int:
        """How many nodes of each tree are worth rows; the likeliest ends of walks come first."""
        assert self._preparing is not None
        assert self._cost is not None
        batch, width = trees.batch, trees.width
        ends = self.calibration.worth(trees)
        reached, above = ends[:, 1:].copy(), trees.parents[:, 1:].numpy(force=True).clip(min=0)
        ends[:, 0] = 1.0
        np.subtract.at(ends, (np.arange(batch)[:, None], above), reached)
        ends[:, 1:] = -np.sort(-ends[:, 1:].clip(min=0), axis=1)
        covered = ends.sum(0).cumsum()  # by groups of a tree, from 1
        rows = np.rint(self._preparing.rows(batch * width, batch, batch * np.arange(1, width + 1))).astype(np.int64)
        seconds = self._dearer / self._usual * self._cost.table(0, int(rows[-1]) + 1)[rows]
        # What the time is worth: tokens that a plain step's time brings at the pace of late.
        pace = self._hoped / self._spent if self._spent else 1.0
        price = batch * max(pace, 1.0) / float(self._cost.table(batch, batch + 1)[0])
        return 1 + int((covered * (1 - LEFT) * self._prize - price * seconds).argmax())

    def _weigh(self, requests: Sequence[Context], worth: np.ndarray) -> list[int]:
        """Sizes of the trees; go to rest where drafting has not paid of late."""
        assert self._cost is not None
        batch = len(worth)
        sizes, gain, seconds = self._best(worth, attached=self._preparing is not None)
        plain = float(self._cost.table(batch, batch + 1)[0])
        if self._preparing is None:
            spent = time.perf_counter() - self._mark  # guessing and weighing; learning from it takes less
            self._aside += (1 - HABIT) * (min(ASIDE * spent, DEAREST * plain) - self._aside)
            seconds += self._aside
        self._balance(gain / batch, seconds / plain)
        if self._spawns:
            nodes = batch + sum(sizes)
            extra = float(self._cost.table(nodes, nodes + 1)[0]) / plain - 1
            brought = max(gain / batch - 1 - self._hoped / self._spent * extra, 0.0)
            self._prize += (1 - WORTH) * (brought - self._prize)
        if self._rest > 0 and self._preparing is not None:
            self._tell(requests, resting=True)
            sizes, *_ = self._best(worth, attached=False)
        return sizes

    def _balance(self, gain: float, spent: float) -> None:
        self._hoped = BALANCE * self._hoped + gain
        self._spent = BALANCE * self._spent + spent
        self._count(fruitful=self._hoped > self._spent)

    def _count(self, *, fruitful: bool) -> None:
        if fruitful:
            self._fruitless, self._next_rest = 0, REST_FIRST
            return
        self._fruitless += 1
        if self._fruitless >= FRUITLESS:
            self._rest = self._next_rest
            # To prepare guesses after a rest costs a pass with rows, not only a look at what is known.
            self._next_rest = min(2 * self._next_rest, REST_LAST if self._preparing is None else 2 * REST_LAST)
            self._fruitless = FRUITLESS - 1  # one more fruitless step is enough to rest again

    def choose(self, worth: np.ndarray) -> list[int]:
        """Guesses per request: the best n of the whole batch, n where l(n) / T(n) is largest.

        Args:
            worth: [B, N], probability that each guess is walked; 0 for roots and padding.
        """
        return self._best(worth, attached=self._preparing is not None)[0]

    def _best(self, worth: np.ndarray, *, attached: bool) -> tuple[list[int], float, float]:
        """The sizes of `choose`, tokens expected of such a step, and its seconds."""
        batch = worth.shape[0]
        if batch == 1:
            flat = np.sort(worth[0])[::-1][: self.max_nodes]
        else:
            order = np.sort(worth, axis=1)[:, ::-1][:, : self.max_nodes]
            flat = np.sort(order, axis=None)[::-1]
            flat = flat[flat > 0]
        gain = np.empty(len(flat) + 1)
        gain[0] = 0.0
        flat.cumsum(out=gain[1:])
        gain += batch
        seconds = self._seconds(batch, len(gain), attached=attached)
        best = int((gain / seconds).argmax())
        chosen = float(gain[best]), float(seconds[best])
        if batch == 1:
            return [best], *chosen
        if best == 0:
            return [0] * batch, *chosen
        least = flat[best - 1]
        sizes, ties = (order > least).sum(1), (order == least).sum(1)
        left = best - int(sizes.sum())  # of equals, which binning makes many, the first requests' are taken
        return (sizes + np.clip(left - (ties.cumsum() - ties), 0, ties)).tolist(), *chosen

    def _seconds(self, batch: int, count: int, *, attached: bool) -> np.ndarray:
        """Seconds of steps over `batch` trees of `batch` to `batch` + `count` - 1 nodes in all."""
        assert self._cost is not None
        if not attached or self._preparing is None:
            return self._cost.table(batch, batch + count)
        groups = max(1, round(self._groups))
        numbers = self._numbers.get((batch, groups))
        if numbers is None or len(numbers) < count:
            nodes = np.arange(batch, batch + max(count, batch * self.max_nodes + 1))
            attached_to = self._preparing.rows(nodes, batch, batch * groups)
            numbers = self._numbers[batch, groups] = np.rint(attached_to).astype(np.int64)
        rows = self._cost.table(0, int(numbers[count - 1]) + 1)[numbers[:count]]
        return (self._dearer * rows + self._aside) / self._usual

    def clock(self, rows: int, seconds: float) -> None:
        """See `Shape.clock`."""
        carried, self._carried = self._carried, 0  # a pass that was not planned here carries nothing
        if self._cost is None or self._own_cost:
            return
        if carried and self._preparing is not None:
            # The shared curve is of plain rows; what differs here is the drafter's own.
            spawned = self._spawned if self._spawns else None
            expected = float(self._cost.of(self._preparing.rows(rows, carried, spawned)))
            self._timed += 1
            share = max(1 - HABIT, 1 / (1 + self._timed))  # the first ones weigh more, as what they correct is a guess
            self._dearer += share * (min(seconds / expected, DEAREST) - self._dearer)
            aside = min(self._drafting + time.perf_counter() - self._mark, DEAREST * expected)
            self._aside += share * (aside - self._aside)
            return
        if self._preparing is not None:
            expected = float(self._cost.table(rows, rows + 1)[0])
            self._usual += (1 - HABIT) * (min(seconds / expected, DEAREST) - self._usual)
        self._clocked += 1
        if self._clocked % CLOCK_EVERY == 0:
            self._cost.observe(rows, seconds)

    def learn(self, requests: Sequence[Context]) -> None:
        """See `Shape.learn`."""
        right = self.calibration.compare(requests)
        self._mark = time.perf_counter()
        if right and self._preparing is None:  # whether or not it was worth a row: the drafter has something to say
            self._fruitless, self._rest, self._next_rest = min(self._fruitless, FRUITLESS - 2), 0, REST_FIRST

    def end(self, request: Context) -> None:
        """See `Shape.end`."""
        self.calibration.forget(request)
