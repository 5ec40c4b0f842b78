"""The sizes of a batch's trees: n guesses where l(n) / T(n) is largest (ProPD, section 4.2).

l(n) is the expected number of tokens of a step, one a request plus the path probabilities of the best n guesses; T(n)
is the time of a step with the rows that they make. Where only real rows are computed, guesses of all requests compete
and a request whose guesses are likely gets more of them. Where trees are padded to the largest, a guess in the
padding costs nothing, and what is chosen is the width.

T starts from the measured curve. What a drafter inside the model adds to it, rows attached to the nodes and work of its
own, and what early pruning takes away, is found in the steps so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from draftree.drafting.base import Drafter
from draftree.runner.step_cost import StepCost
from draftree.shaping.gathered import StepTime
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.early import EarlyPruning

HABIT = 0.9  # weight of the past in what steps were found to take
SLOW_HABIT = 0.97  # the same of such as there are many of
SHARE = 0.4  # of the time that a planned step takes beside its rows, what one that is not takes, before it is known
DEAREST = 4.0  # times the expected, as a single step counts
WORTH = 0.95  # weight of the past in how many nodes have rows, and in what guesses are found to be worth
SURE = 16  # steps with guesses that tell the curve how quick the machine is
CALM_FIRST, CALM_SHARE = 0.6, 0.3  # weight of a rest in how much quicker undisturbed passes are
CALMEST = 0.75  # of the time of others, the least that these take
BARE_EVERY = 512  # most steps with guesses from one plain step to the next
GROUPS_FIRST, PRIZE_FIRST = 1.0, 0.5  # nodes of a tree with rows, and what guesses are worth, before it is known
LEFT = 0.5  # of that worth, what the rows of a node further up still bring


class Choice(NamedTuple):
    """What is best for a step.

    Attributes:
        sizes: guesses per request.
        gains: tokens expected per request.
        seconds: time expected of the step.
    """

    sizes: list[int]
    gains: list[float]
    seconds: float


class Planner:
    """Chooses sizes by expected tokens and expected time.

    Args:
        max_nodes: most guesses per request.

    Attributes:
        cost: seconds of a plain step by its rows.
        attaching: the drafter, if it prepares its guesses in the pass before.
        pruner: drops guesses inside the pass; None for none.
        packed: whether only real rows cost, and not the padding of smaller trees.
        spawns: whether the drafter attaches rows to nodes, so that their number can be chosen.
    """

    def __init__(self, max_nodes: int, cost: StepCost | None) -> None:
        self.max_nodes = max_nodes
        self._cost = cost
        self._of_batches: dict[int, StepCost] = {}  # by number of requests
        self.attaching: Drafter | None = None
        self.pruner: EarlyPruning | None = None
        self.packed = True
        self.spawns = False
        # Seconds of a step beside the time of its rows: with the drafter's work, and without.
        self._own = self._plain = 0.0
        self._between, self._between_steps = 0.0, 0  # the first of steps that are not planned, and how many there were
        # The same of steps in which a drafter that prepares its guesses is asked for such as need no preparing.
        self._own_unprepared = self._plain_unprepared = 0.0
        self._dearer = self._warm = 1.0  # a pass with its rows, against a plain one of as many; in steps not planned
        self._usual = 1.0  # a plain pass, against what the curve says of it; that learns more slowly
        self._timed = self._bare = 0  # steps that these two are learned from
        self._met: set[int] = set()  # numbers of requests of which plain steps were seen
        self._since_bare = 0  # steps with guesses since a plain one
        # By number of requests: plain passes among such, against what the curve says of them; and steps with guesses
        # that the curve learned from since.
        self._calm: dict[int, float] = {}
        self._guessed: Counter[int] = Counter()
        self._groups = GROUPS_FIRST  # nodes of a tree that have rows attached, of late
        self._prize = PRIZE_FIRST  # tokens that guesses add to a step, less what those would cost otherwise
        # By batch, spawning nodes of a tree and whether there are any: rows of passes over one node, two, and so on.
        self._numbers: dict[tuple[int, int, bool], np.ndarray] = {}

    def bind(self, cost: StepCost, drafter: Drafter | None, pruner: EarlyPruning | None, *, packed: bool) -> None:
        """Meet the machine and what shares the pass."""
        if cost is not self._cost:
            self._of_batches.clear()
            self._calm.clear()
            self._guessed.clear()
            self._bare = 0
            self._met &= {1}  # whose curve is measured
        self._cost, self.pruner = cost, pruner
        self.attaching = drafter if drafter is not None and drafter.prepares else None
        self.packed = packed and self.attaching is None and pruner is None  # what is done inside the pass is padded
        self.spawns = self.attaching is not None and self.attaching.rows(8, 1, 1) != self.attaching.rows(8, 1, 8)
        self._numbers.clear()

    @property
    def known(self) -> StepCost | None:
        """The cost met last; None before any."""
        return self._cost

    def cost(self, batch: int) -> StepCost:
        """Seconds of a plain step by its rows, with so many requests."""
        assert self._cost is not None
        if batch == 1:
            return self._cost
        found = self._of_batches.get(batch)
        if found is None:
            found = self._of_batches[batch] = self._cost.for_batches()
        return found

    def plain(self, batch: int) -> float:
        """Seconds of a step without guesses."""
        return float(self.cost(batch).from_one(batch)[batch - 1])

    def unsure(self, batch: int) -> bool:
        """Whether too little is known of what plain steps take, which all others are weighed against.

        Their curve may have been measured in a bad moment; and if all steps carry guesses, nothing corrects it.
        """
        if batch in self._met and self._guessed[batch] >= SURE and batch not in self._calm:
            return True
        return batch not in self._met or self._since_bare > BARE_EVERY

    def undisturbed(self, batch: int) -> float:
        """Seconds of a step without guesses, and without a drafter that leaves its own in the caches."""
        return self.plain(batch) * self._calm.get(batch, 1.0)

    def plain_whole(self, batch: int) -> float:
        """Seconds of a step without guesses, with all that is done beside its pass, where a drafter attaches rows."""
        return self.plain(batch) * self._usual + self._plain

    @property
    def beside(self) -> float:
        """Seconds that a plain step takes beside its pass."""
        return max(self._plain, 0.0)

    @property
    def aside(self) -> float:
        """Seconds that a step takes longer for the drafter's work, the time of rows left out."""
        return max(self._own - self._plain, 0.0)

    @property
    def aside_between(self) -> float:
        """The same of a step that is not planned, where only the shape's work is saved, and not the drafter's own."""
        if not self._between_steps:
            return SHARE * self.aside
        return max(self._between - self._plain, 0.0)

    @property
    def aside_unprepared(self) -> float:
        """The same, where a drafter that prepares its guesses has prepared none."""
        return max(self._own_unprepared - self._plain_unprepared, 0.0)

    # ---------------------------------------------------------------- sizes

    def best(self, worth: np.ndarray, *, attached: bool) -> Choice:
        """The sizes with most tokens a second.

        Args:
            worth: [B, N], probability that each guess is walked; 0 for roots and padding.
            attached: whether the drafter's own rows are in the pass.
        """
        batch = len(worth)
        if batch == 1:
            return self._alone(worth[0], attached=attached)
        order = np.sort(worth, axis=1)[:, ::-1][:, : self.max_nodes]
        if self.packed:
            return self._shared(order, attached=attached)
        totals = order.cumsum(1)
        gain = np.empty(1 + order.shape[1])
        gain[0] = batch
        np.add(totals.sum(0), batch, out=gain[1:])
        seconds = self.seconds(batch, len(gain), attached=attached)
        width = int((gain / seconds).argmax())
        if width == 0:
            return Choice([0] * batch, [1.0] * batch, float(seconds[0]))
        sizes = (order[:, :width] > 0).sum(1).tolist()
        return Choice(sizes, (1 + totals[:, width - 1]).tolist(), float(seconds[width]))

    def _alone(self, worth: np.ndarray, *, attached: bool) -> Choice:
        """The same for one request; worth [N] of its nodes, the root's 0."""
        gain = np.sort(worth)[: -self.max_nodes - 2 : -1]  # the root's 0 comes last
        gain[1:] = gain[:-1]
        gain[0] = 1.0
        gain = gain.cumsum()
        seconds = self.seconds(1, len(gain), attached=attached)
        size = int((gain / seconds).argmax())
        return Choice([size], [float(gain[size])], float(seconds[size]))

    def _shared(self, order: np.ndarray, *, attached: bool) -> Choice:
        """The best n guesses of the whole batch; order [B, n], falling."""
        batch = len(order)
        flat = np.sort(order, axis=None)[::-1]
        flat = flat[flat > 0]
        gain = np.empty(len(flat) + 1)
        gain[0] = 0.0
        flat.cumsum(out=gain[1:])
        gain += batch
        seconds = self.seconds(batch, len(gain), attached=attached)
        best = int((gain / seconds).argmax())
        if best == 0:
            return Choice([0] * batch, [1.0] * batch, float(seconds[0]))
        least = flat[best - 1]
        sizes, ties = (order > least).sum(1), (order == least).sum(1)
        left = best - int(sizes.sum())  # of equals, which binning makes many, the first requests' are taken
        sizes = sizes + np.clip(left - (ties.cumsum() - ties), 0, ties)
        totals = np.concatenate([np.zeros((batch, 1)), order.cumsum(1)], 1)
        return Choice(sizes.tolist(), (1 + totals[np.arange(batch), sizes]).tolist(), float(seconds[best]))

    def seconds(self, batch: int, count: int, *, attached: bool) -> np.ndarray:
        """Seconds of `count` sizes of step over `batch` trees: roots alone, and then a guess more each.

        A guess more in all where rows are packed, in every tree where they are padded.
        """
        more = 1 if self.packed else batch
        return self.by_nodes(batch, batch + (count - 1) * more, attached=attached)[batch - 1 :: more][:count]

    def by_nodes(self, batch: int, count: int, *, attached: bool, planned: bool = True) -> np.ndarray:
        """Seconds of steps over `batch` trees with one node in all, two, and so on to `count`.

        Args:
            batch: less nodes than these are no step.
            count: how many numbers at least.
            attached: whether the drafter's own rows are in the pass.
            planned: whether these are steps that are planned, out of cold caches.
        """
        attaching = self.attaching if attached else None
        if attaching is None and self.pruner is None:
            return self.cost(batch).from_one(count)
        groups = self.groups
        key = (batch, groups, attached)
        numbers = self._numbers.get(key)
        if numbers is None or len(numbers) < count:
            nodes = np.arange(1, 1 + max(count, batch * (self.max_nodes + 1)))
            rows = nodes if attaching is None else attaching.rows(nodes, batch, batch * groups)
            numbers = self._numbers[key] = np.rint(rows).astype(np.int64)
        numbers = numbers[:count]
        if self.pruner is not None:
            numbers = np.rint(self.pruner.rows(numbers)).astype(np.int64)
        seconds = self.cost(batch).table(0, int(numbers.max()) + 1)[numbers]
        if attaching is None:
            return seconds
        dearer, aside = (self._dearer, self._own) if planned else (self._dearer_between, self._own_between)
        # In units of the curve, which says what a plain pass takes, and not what is done beside it.
        return (dearer * seconds + aside) * (self.plain(batch) / self.plain_whole(batch))

    @property
    def _own_between(self) -> float:
        return self._between if self._between_steps else SHARE * self._own

    @property
    def _dearer_between(self) -> float:
        """What a pass with a drafter's rows takes against a plain one of as many, in steps that are not planned."""
        return self._warm if self._between_steps else 1.0 + SHARE * (self._dearer - 1.0)

    # ---------------------------------------------------------------- rows that nodes spawn

    def spawning(self, trees: TokenTree, worth: np.ndarray | None, pace: float) -> int:
        """How many nodes of each tree are worth rows; the likeliest ends of walks come first.

        Args:
            trees: to be verified.
            worth: [B, N], probability that each node is walked; None for roots alone.
            pace: tokens that the time of a plain step brings.
        """
        if worth is None:
            return self._noted(1)
        assert self.attaching is not None
        batch, width = trees.batch, trees.width
        ends = worth.copy()
        reached, above = ends[:, 1:].copy(), trees.parents[:, 1:].numpy(force=True).clip(min=0)
        ends[:, 0] = 1.0
        np.subtract.at(ends, (np.arange(batch)[:, None], above), reached)
        ends[:, 1:] = -np.sort(-ends[:, 1:].clip(min=0), axis=1)
        covered = ends.sum(0).cumsum()  # by groups of a tree, from 1
        rows = np.rint(self.attaching.rows(batch * width, batch, batch * np.arange(1, width + 1))).astype(np.int64)
        seconds = (
            self._dearer
            * self.plain(batch)
            / self.plain_whole(batch)
            * self.cost(batch).table(0, int(rows[-1]) + 1)[rows]
        )
        price = batch * pace / self.plain(batch)  # what the time is worth in tokens
        return self._noted(1 + int((covered * (1 - LEFT) * self._prize - price * seconds).argmax()))

    @property
    def groups(self) -> int:
        """Nodes of a tree that have rows attached, of late."""
        return max(1, round(self._groups))

    def _noted(self, count: int) -> int:
        self._groups += (1 - WORTH) * (count - self._groups)
        return count

    def prized(self, choice: Choice, pace: float) -> None:
        """Guesses were weighed: what do they bring, beyond what their own rows cost?"""
        batch = len(choice.sizes)
        plain = self.plain(batch)
        nodes = batch + sum(choice.sizes)
        extra = float(self.cost(batch).table(nodes, nodes + 1)[0]) / plain - 1
        brought = max(sum(choice.gains) / batch - 1 - pace * extra, 0.0)
        self._prize += (1 - WORTH) * (brought - self._prize)

    # ---------------------------------------------------------------- what steps took

    def asked(self, rows: int, batch: int, whole: float) -> None:
        """A plain step of `rows` rows for which a drafter was asked took `whole` seconds in all."""
        expected = float(self.cost(batch).from_one(rows)[rows - 1])
        beside = min(whole, DEAREST * expected) - expected
        if self.attaching is None:
            self._own += (1 - HABIT) * (beside - self._own)
        else:
            self._own_unprepared += (1 - HABIT) * (beside - self._own_unprepared)

    def cruised(self, batch: int, told: Sequence[StepTime]) -> None:
        """These steps were not planned."""
        steps, curve = len(told), self.cost(batch)
        self._since_bare += steps
        self._guessed[batch] += steps
        self._add_between(sum(step.whole - step.seconds for step in told) / steps, steps)
        # One by one against the curve, as rows of the average number take less time than they do on the average.
        table = curve.from_one(max(step.rows for step in told))
        slower = sum(step.seconds for step in told) / sum(float(table[step.rows - 1]) for step in told)
        rows = round(sum(step.rows for step in told) / steps)
        curve.observe(rows, slower * float(table[rows - 1]), steps)

    def rested(self, batch: int, told: Sequence[StepTime]) -> None:
        """These steps were a rest's.

        Behind steps with guesses, which the curve has learned from, they tell how much quicker a pass is that no
        drafter disturbs. Later ones tell the curve itself how quick the machine is.
        """
        steps, curve = len(told), self.cost(batch)
        seconds = sum(step.seconds for step in told) / steps
        if self._guessed[batch] >= SURE:
            found = min(max(seconds / float(curve.of(batch)), CALMEST), 1.0)
            before = self._calm.get(batch, 1.0)
            self._calm[batch] = before + (CALM_SHARE if batch in self._calm else CALM_FIRST) * (found - before)
        self._guessed[batch] = 0
        curve.observe(batch, seconds / self._calm.get(batch, 1.0), steps)
        self.bare(batch, batch, seconds, sum(step.whole for step in told) / steps, steps)

    def _add_between(self, beside: float, steps: int = 1) -> float:
        """Learn what steps that were not planned took beside their passes; what they weigh against those before."""
        self._between_steps += steps
        share = max(1 - SLOW_HABIT**steps, steps / self._between_steps)
        self._between += share * (beside - self._between)
        return share

    def attached(
        self, rows: int, batch: int, spawned: int | None, seconds: float, aside: float, *, planned: bool = True
    ) -> None:
        """A pass over trees of `rows` nodes with the drafter's rows took `seconds`, the rest of the step `aside`."""
        assert self.attaching is not None
        self._since_bare += 1
        all_rows = self.attaching.rows(rows, batch, spawned)
        if self.pruner is not None:
            all_rows = self.pruner.rows(all_rows)
        # The shared curve is of plain rows; what differs here is the drafter's own.
        expected = float(self.cost(batch).of(all_rows))
        dearer, aside = min(seconds / expected, DEAREST), min(aside, DEAREST * expected)
        if not planned:
            share = self._add_between(aside)
            self._warm += share * (dearer - self._warm)
            return
        self._timed += 1
        share = max(1 - HABIT, 1 / (1 + self._timed))  # the first ones weigh more, as what they correct is a guess
        self._dearer += share * (dearer - self._dearer)
        self._own += share * (aside - self._own)

    def bare(self, rows: int, batch: int, seconds: float, whole: float, steps: int = 1) -> None:
        """So many steps of `rows` rows took `whole` seconds each without a drafter, their passes `seconds`."""
        expected = float(self.cost(batch).from_one(rows)[rows - 1])
        beside = min(whole - seconds, DEAREST * expected)
        self._met.add(batch)
        self._bare, self._since_bare = self._bare + steps, 0
        share = max(1 - HABIT**steps, steps / (1 + self._bare))
        self._plain += share * (beside - self._plain)
        if self.attaching is not None:
            self._usual += share * (min(seconds / expected, DEAREST) - self._usual)
            own = min(whole, DEAREST * expected) - expected
            self._plain_unprepared += (1 - HABIT) * (own - self._plain_unprepared)
