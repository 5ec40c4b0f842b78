"""Trees sized by what they bring and what they cost, and no trees at all where drafting does not pay.

Most steps have the guesses that their drafter is sure enough of, as far as such have paid of late (`Cruise`). In
planned ones, guesses are weighed: their drafter's own probabilities are over-confident, so they are calibrated
(`Calibration`), and the `Planner` sets them against the measured time of rows. Where no guess of a step pays, its tree
is the root alone. Whether the drafter is asked at all is the `Governor`'s to say, for each request by itself.

A drafter inside the model pays for its guesses one step ahead: with rows that it attaches to nodes of the tree, and
with the time it takes to read and arrange what they say. Both count in the time of its steps. The step that goes to
rest still verifies what was guessed, at plain cost. Rows of a node are wasted unless the walk ends there: only so many
nodes get some as are worth it, by the chance of that, by what guesses brought of late, and by the time of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from draftree.drafting.base import Context, Drafter
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Shape
from draftree.shaping.by_rank import ByRank
from draftree.shaping.calibration import Calibration
from draftree.shaping.cells import above, reach
from draftree.shaping.compiled import AHEAD
from draftree.shaping.cost_line import CostLine
from draftree.shaping.cruise import Cruise, Pace, promise_of
from draftree.shaping.gathered import Gathered
from draftree.shaping.governor import REST_ASKED, REST_LAST, REST_PREPARED, Governor
from draftree.shaping.planner import Choice, Planner
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.early import EarlyPruning

COSTS = ("measured", "line")
ACCEPTANCES = ("calibrated", "by-rank", "product")
IDLE_EVERY = 16  # steps of a rest between two that are learned from: they must stay as cheap as plain ones
RECENT = 0.85  # how fast the largest tree of late fades, per planned step
LEARN_EVERY = 8  # steps that are not planned, resting or not, whose times are learned from together
HEARD = 64  # steps of a rest whose times are heard of; later, so many in each as are learned from together
PLAN_EVERY = 8  # cruises that pay from one plan to the next; one where plans also say which nodes have rows attached
PAUSE = 9  # plain steps in a row, where it has to be known again what they take
ASK_FACTOR, ASK_LEAST = 1.5, 8  # guesses asked for: this times the largest of late, and some


class DynamicTree(Shape):
    """Sizes every step's trees by expected tokens and the cost of a step.

    Args:
        max_nodes: most guesses per request.
        cost: what a step costs: "measured", the engine's own measurement, kept true by the steps themselves; "line",
            the paper's straight line through their times; or a `StepCost` that is taken as it is.
        acceptance: how likely guesses are: "calibrated", by how often such of the drafter's own probabilities held;
            "by-rank", by depth, rank and whether the parent lies on the best path; "product", the paper's product of
            each depth's shares.
    """

    def __init__(self, max_nodes: int = 64, cost: StepCost | str = "measured", acceptance: str = "calibrated") -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is {max_nodes}: give 1 or more, or use no drafter at all.")
        if isinstance(cost, str) and cost not in COSTS:
            raise ValueError(f"cost is {cost!r}: choose {' or '.join(COSTS)}, or give a StepCost.")
        if acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance is {acceptance!r}: choose {', '.join(ACCEPTANCES)}.")
        self.max_nodes = max_nodes
        self.calibration: Calibration | ByRank
        self.calibration = Calibration() if acceptance == "calibrated" else ByRank(conditional=acceptance == "by-rank")
        self.governor = Governor()
        self._beside = Governor()  # of what a drafter that prepares its guesses has without: a trie beside heads
        self._by = self.governor  # whose decision the coming step is
        self._heeded = False  # whether the drafter keeps to `Context.least`
        self._unprepared = False  # whether there is such a part
        self._own_cost = None if isinstance(cost, str) else cost
        self._line = cost == "line"
        self.planner = Planner(max_nodes, self._own_cost)
        self._recent = 0.0  # most guesses verified of late, fading
        self._idle = self._in_row = 0  # steps; in a row without a look at anything
        self._ids: list[int] = []  # of the coming step's requests
        self._quiet = self._passed = 0  # steps to come in which all of them rest; such as the governor was not told of
        self._plain = Gathered(LEARN_EVERY)  # steps of rests that the planner was not told of
        self._cruised = Gathered(LEARN_EVERY)  # and of courses
        self._batch = 1  # requests of the coming step
        self._asking = False  # whether the drafter is asked in the coming step
        self._asked: list[bool] = []  # of the coming step's requests; empty for all
        self._booked: dict[int, tuple[Governor, float]] = {}  # by request: by whom, its length after the step, as hoped
        self._spawned: int | None = None  # nodes of the coming step that have rows attached; None for all
        self._carried = 0  # requests of the coming step, if the drafter prepares the next one in it
        self._simple = False  # whether a step's time goes by the nodes of its trees alone
        self._cruise = Cruise()
        self._planned = False  # whether the coming step is planned although its requests are drafted for anyway
        self._steady: list[int] | None = None  # guesses of the coming step, where it is not planned

    def bind(
        self,
        cost: StepCost,
        drafter: Drafter | None = None,
        pruner: EarlyPruning | None = None,
        *,
        packed: bool = True,
    ) -> None:
        """See `Shape.bind`."""
        if self._line:
            held = self.planner.known  # what was learned lasts from one engine to the next
            cost = held if isinstance(held, CostLine) else CostLine(cost)
        self.planner.bind(self._own_cost or cost, drafter, pruner, packed=packed)
        # To prepare guesses after a rest costs a pass with rows, not only a look at what is known.
        self.governor.longest = REST_ASKED if self.planner.attaching is None else REST_PREPARED
        self._cruise.plan_every = PLAN_EVERY if self.planner.attaching is None else 1
        self._heeded = drafter is not None and drafter.heeds_least
        self._unprepared = self.planner.attaching is not None and drafter is not None and drafter.unprepared
        self._simple = pruner is None and not self._unprepared and isinstance(self.calibration, Calibration)

    def rests(self, requests: Sequence[Context]) -> bool:
        """See `Shape.rests`: most steps of a rest; now and then one is looked at, for what plain steps take."""
        self._steady, self._planned = None, False
        ids = [request.id for request in requests]
        same, cruise = ids == self._ids, self._cruise
        if self._quiet and same:
            self._quiet -= 1
            self._passed += 1
            return True
        if cruise.running and same:
            self._steady = cruise.due(requests)
            if self._steady is not None:
                return self._cruises()
        elif cruise.running and not self.governor.knows(ids):
            return True  # their prompts are read apart; they join those on the way
        if self._passed:
            self.governor.elapse(self._ids, self._passed)
            self._quiet = self._passed = 0
        if not same:  # times of other numbers of requests do not go together
            self._plain, self._cruised = Gathered(LEARN_EVERY), Gathered(LEARN_EVERY)
        self._ids = ids
        for course in cruise.over(requests):
            self.governor.settle(course.request, course.gain, course.spent, course.steps)
        ahead = int(self.planner.attaching is not None)  # where guesses are prepared, the last step of a rest does that
        quiet = self.governor.quiet(requests, ahead=ahead)
        if self._simple:
            if not quiet and self._goes_on(requests, ahead):
                return False
            self._quiet = max(quiet or self.governor.quiet(requests, ahead=ahead), 1) - 1
            self._passed = 1
            return True
        self._idle += 1
        if not quiet or self._idle % IDLE_EVERY == 0 or self._unprepared or self.calibration.waiting:
            return False
        self._passed = 1
        return True

    def _cruises(self) -> bool:
        """The coming step is not planned, and has guesses: no rest."""
        self._passed += 1
        self._carried = len(self._ids) if self.planner.attaching is not None else 0
        return False

    def _goes_on(self, requests: Sequence[Context], ahead: int) -> bool:
        """A rest or a course is over: whether the coming step has guesses, planned or the first of a course."""
        assert isinstance(self.calibration, Calibration)
        planner, cruise, batch = self.planner, self._cruise, len(requests)
        packed = planner.packed or batch == 1
        pace = self._pace(batch, batch * (AHEAD + 1))
        takes = self.governor.awake(requests, ahead=ahead, hopeful=lambda: cruise.promises(batch, pace))
        if not any(takes) or self._looks_at_plain_steps(requests):
            return False
        if cruise.plan_due:
            self._planned, self._asked = True, takes
            cruise.planned()
            return True
        if not cruise.known:
            if not cruise.explore(requests, takes, pace, packed=packed):
                self.governor.pause(requests, REST_LAST)
                return False
        else:
            averages = cruise.averages(requests, takes)
            best = reach(averages, pace.seconds, pace.aside + pace.beside, packed=packed)
            promise = cruise.set_out(requests, best, takes, pace, packed=packed)
            if promise < promise_of(averages) and self.governor.declines(requests, takes):
                cruise.stop()
                return False
        if planner.spawns:
            self._spawned = batch * planner.groups
            for request in requests:
                request.spawn = planner.groups
        self._steady = cruise.due(requests)
        return not self._cruises()

    def _pace(self, batch: int, nodes: int) -> Pace:
        """What steps take that are not planned."""
        planner = self.planner
        attached = planner.attaching is not None
        seconds = planner.by_nodes(batch, nodes, attached=attached, planned=False)
        aside = 0.0 if attached else planner.aside_between  # what is done aside is in the time of attached rows
        plain = planner.plain(batch) if attached else planner.undisturbed(batch)
        return Pace(seconds, aside, plain, 0.0 if attached else planner.beside, self._cruise.slower(batch))

    def budgets(self, requests: Sequence[Context], most: int) -> list[int]:
        """See `Shape.budgets`."""
        if self._steady is not None:
            return [min(size, most, self.max_nodes) for size in self._steady]
        for request in requests:
            request.least = None
        self._batch = len(requests)
        if not self._recent:  # a look-up takes longer for more guesses, and rows of a large batch are dear
            self._recent = min(self.max_nodes, AHEAD) / self._batch
        self._by = self.governor
        if self._planned:
            self.governor.elapse(self._ids)
        else:
            self._asked = self.governor.open(requests)
        resting = self.planner.attaching is None or all(request.resting for request in requests)
        self._carried = 0 if resting else len(requests)
        if self._unprepared and resting and not any(self._asked):
            self._by = self._beside
            self._asked = self._beside.open(requests)
            _keep_resting(requests)
        self._asking = any(self._asked)
        # Beyond a multiple of what was verified of late, guesses would be drafted only to be cut off again.
        budget = min(self.max_nodes, most, int(ASK_FACTOR * self._recent) + ASK_LEAST)
        return [budget if asked else 0 for asked in self._asked]

    def trim(self, requests: Sequence[Context], trees: TokenTree) -> TokenTree:
        """See `Shape.trim`."""
        if self._steady is not None:
            return trees if self._heeded else above(trees, [request.least for request in requests])
        if self._planned and trees.width > 1 and isinstance(self.calibration, Calibration):
            trimmed = self._trim_simple(self.calibration, requests, trees)
            if trimmed is not None:
                return trimmed
        sizes = [0] * trees.batch
        worth = None
        if trees.width > 1:
            if isinstance(self.calibration, ByRank):
                trees = self.calibration.weighed(trees)
            self.calibration.remember(requests, trees, always=self.governor.losing)
            worth = self.calibration.worth(trees, requests)
            sizes = self._weigh(requests, worth)
        elif not self._planned and (self._by is self._beside or self.planner.attaching is None):
            for request, asked in zip(requests, self._asked, strict=True):
                if asked:
                    self._by.book(request, 1.0, 1.0, known=False)
            if self._by is self._beside:
                _keep_resting(requests)
        self._recent = max(max(sizes), RECENT * self._recent)
        if any(n < size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
            trees, worth = trees.best(sizes), None
        self._spread(requests, trees, worth)
        return trees

    def _spread(self, requests: Sequence[Context], trees: TokenTree, worth: np.ndarray | None = None) -> None:
        """Decide how many nodes of each tree have rows attached, if any are."""
        if not (self.planner.spawns and self._carried):
            return
        if worth is None and trees.width > 1:
            worth = self.calibration.worth(trees, requests)
        count = self.planner.spawning(trees, worth, self.governor.pace)
        self._spawned = trees.batch * count
        for request in requests:
            request.spawn = count

    def _trim_simple(self, calibration: Calibration, requests: Sequence[Context], trees: TokenTree) -> TokenTree | None:
        """The same in one call, where nothing leaves in the pass; None where trees are unsorted."""
        planner, batch = self.planner, trees.batch
        packed = planner.packed or batch == 1
        pace = self._pace(batch, batch * (max(trees.width, AHEAD) + 1))
        averages = self._cruise.averages(requests, self._asked)
        now = calibration.plan(requests, trees, averages, pace.seconds, packed=packed)
        if now is None:
            return None
        calibration.remember(requests, trees, always=batch == 1 or self.governor.losing)
        rows = batch + sum(now.sizes) if packed else batch * (1 + max(now.sizes))
        choice = Choice(now.sizes, now.gains, float(pace.seconds[rows - 1]))
        best = reach(averages, pace.seconds, pace.aside + pace.beside, packed=packed)
        self._cruise.set_out(requests, best, self._asked, pace, packed=packed)
        if planner.spawns:
            planner.prized(choice, self.governor.pace)
        sizes = now.sizes
        self._recent = max(max(sizes), RECENT * self._recent)
        if any(n < size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
            trees = trees.first(sizes)
        self._spread(requests, trees)
        return trees

    def _looks_at_plain_steps(self, requests: Sequence[Context]) -> bool:
        """Whether all rest for a moment, since too little is known of what drafting is weighed against."""
        if self._own_cost is not None or not self._cruise.known or not self.planner.unsure(len(requests)):
            return False
        self.governor.pause(requests, 1 + PAUSE)
        self._idle = 0
        return True

    def _weigh(self, requests: Sequence[Context], worth: np.ndarray) -> list[int]:
        """Sizes of the trees; some requests may go to rest by it."""
        planner = self.planner
        attached = planner.attaching is not None and self._by is self.governor
        choice = planner.best(worth, attached=attached)
        aside = planner.aside if self._by is self.governor else planner.aside_unprepared
        self._book(requests, choice, planner.plain(len(requests)), aside, attached=attached)
        if self._by is self._beside:
            _keep_resting(requests)
        elif planner.spawns:
            planner.prized(choice, self.governor.pace)
        if attached and self._carried and all(request.resting for request in requests):
            self._carried = 0
            choice = planner.best(worth, attached=False)
        return choice.sizes

    def _book(self, requests: Sequence[Context], choice: Choice, plain: float, aside: float, *, attached: bool) -> None:
        """Each request pays for its rows; those that were asked, for the drafter's work `aside` in equal parts."""
        batch = len(requests)
        every = self._asked or [True] * batch
        aside = 0.0 if attached else aside / max(sum(every), 1)  # or it is in the time of the rows
        rows = choice.seconds - plain
        parts = [size + attached for size in choice.sizes]
        each = rows / max(sum(parts), 1)
        for request, asked, gain, part in zip(requests, every, choice.gains, parts, strict=True):
            if asked:
                self._by.book(request, gain, 1.0 + (part * each + aside) * batch / plain)
                self._booked[request.id] = self._by, len(request.tokens) + gain

    def choose(self, worth: np.ndarray) -> list[int]:
        """Guesses per request, where expected tokens over expected time is largest.

        Args:
            worth: [B, N], probability that each guess is walked; 0 for roots and padding.
        """
        return self.planner.best(worth, attached=self.planner.attaching is not None).sizes

    def clock(self, rows: int, seconds: float, whole: float, *, plain: bool = True, attached: bool = True) -> None:
        """See `Shape.clock`."""
        self._in_row = 0
        carried, self._carried = self._carried if attached else 0, 0  # a pass not planned here carries nothing
        steady, self._steady = self._steady, None
        asked, self._asking = self._asking, False
        if self._own_cost is not None:
            return
        planner = self.planner
        if carried:
            spawned = self._spawned if planner.spawns else None
            planner.attached(rows, carried, spawned, seconds, whole - seconds, planned=steady is None)
            return
        if steady is not None:
            if planner.attaching is None:
                self._cruise.took(whole)
            heard = planner.attaching is None and plain and self._cruise.begun
            if heard and (told := self._cruised.add(rows, seconds, whole)):
                planner.cruised(len(steady), told)
            return
        if not plain:
            return
        if asked and (planner.attaching is None or self._by is self._beside):
            planner.asked(rows, self._batch, whole)
        else:
            planner.bare(rows, self._batch, seconds, whole)
        planner.cost(self._batch).observe(rows, seconds)

    def rested(self, batch: int, seconds: float, whole: float) -> None:
        """See `Shape.rested`."""
        self._in_row += 1
        if self._in_row > HEARD and self._in_row & HEARD - LEARN_EVERY:  # some of many are enough
            return
        if self._own_cost is not None or self._in_row < 3:  # the first ones are cold
            self._plain.clear()
            return
        if told := self._plain.add(batch, seconds, whole):
            self.planner.rested(batch, told)

    def learn(self, requests: Sequence[Context], walks: Sequence[Sequence[int]], trees: TokenTree) -> None:
        """See `Shape.learn`."""
        if self._steady is not None:
            self._cruise.learn(walks, trees)
            return
        for request in requests:
            booked = self._booked.pop(request.id, None)
            if booked is not None:
                governor, hoped = booked
                governor.correct(request, len(request.tokens) - hoped)
        right = self.calibration.compare(requests)
        if right and (self.planner.attaching is None or self._by is self._beside):
            self._by.right(right)

    def end(self, request: Context) -> None:
        """See `Shape.end`."""
        self.calibration.forget(request)
        self.governor.end(request)
        self._beside.end(request)
        self._cruise.end(request.id)
        self._booked.pop(request.id, None)


def _keep_resting(requests: Sequence[Context]) -> None:
    """What needs preparing goes on resting, whatever is decided about the rest."""
    for request in requests:
        request.resting = True
