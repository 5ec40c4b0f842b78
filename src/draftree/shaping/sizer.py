"""`DynamicTree` in one engine: plan a step, trim its trees, learn from it.

1. Plan: the pause policy decides whether to draft; budgets follow the sizes of recent trees.
2. Trim: each draft token gets the share of such tokens that were accepted (`AcceptanceStatistics`), and as many are
   verified as give most tokens per second (`choose`).
3. Observe: step times, acceptance statistics and the pause policy learn from the outcome.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from draftree.drafting.base import Drafter, RequestState, StepPlan
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Outcome, Sizer
from draftree.shaping.planner import PLAIN, PREPARED, UNPREPARED, AcceptanceStatistics, PausePolicy, cells_of, choose
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.pruner import Pruner

RATE = 0.1  # weight of a step in the mean time of drafting; the first ones weigh more
STALL = 3.0  # the most that one step counts, in means


class Kind(Enum):
    """The kind of a pass."""

    TREES = "trees"
    ATTACHED = "attached"
    PRUNED = "pruned"


class StepTimes:
    """Seconds of steps: they start from `cost`, a curve of one request; with `learns` real steps correct it."""

    def __init__(self, cost: StepCost, *, learns: bool = True) -> None:
        self._cost = cost
        self.learns = learns
        self._curves: dict[tuple[int, Kind], StepCost] = {}
        self._drafting: dict[tuple[int, int], tuple[float, int]] = {}  # by requests and way: seconds, steps

    def curve(self, requests: int, kind: Kind = Kind.TREES) -> StepCost:
        """Return seconds from the pass to the end of the step, by rows, for this number of requests."""
        key = (requests, kind)
        found = self._curves.get(key)
        if found is None:
            plain = self._curves.get((requests, Kind.TREES), self._cost)
            found = self._curves[key] = plain.for_batch() if self.learns else plain
        return found

    def plain(self, requests: int) -> float:
        """Return seconds of a step without draft tokens."""
        return float(self.curve(requests).table[requests])

    def drafting(self, requests: int, way: int) -> float:
        """Return seconds of drafting before the pass."""
        return self._drafting.get((requests, way), (0.0, 0))[0]

    def observe(self, requests: int, kind: Kind, rows: int, seconds: float) -> None:
        """Record the seconds of a step from its pass on."""
        if self.learns:
            self.curve(requests, kind).observe(rows, seconds)

    def observe_drafting(self, requests: int, way: int, seconds: float) -> None:
        """Record the seconds of drafting."""
        mean, steps = self._drafting.get((requests, way), (0.0, 0))
        if steps > 2:
            seconds = min(seconds, STALL * mean)
        self._drafting[requests, way] = (mean + max(1 / (steps + 1), RATE) * (seconds - mean), steps + 1)


MORE = 2  # draft tokens asked for above the largest of the request's recent trees
CHEAP = 0.05  # largest share of a plain step in drafting at which twice that tree is asked for
RECENT = 0.9  # fading of the largest recent tree per step
BARE_FIRST, BARE_LAST = 16, 128  # steps with attached rows before one without them
HARDLY = 0.05  # share by which rows at more nodes than the root may lengthen a pass
FIRST_TREE = 4.0  # prior of the largest recent tree


class Learned:
    """Statistics of a drafter over all requests and engines, guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.statistics = AcceptanceStatistics()
        self.policies: dict[tuple[int, ...], PausePolicy] = {}  # by the drafter's ways

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())


class DynamicSizer(Sizer):
    """See `DynamicTree` and `Shape.bind`; `learned` is shared with other engines."""

    def __init__(
        self,
        learned: Learned,
        times: StepTimes,
        drafter: Drafter,
        pruner: Pruner | None,
        *,
        max_nodes: int,
        packed: bool,
    ) -> None:
        can = drafter.capabilities
        ways = tuple([UNPREPARED] * (can.unprepared or not can.prepares) + [PREPARED] * can.prepares)
        with learned.lock:
            self._policy = learned.policies.setdefault(ways, PausePolicy(ways))
        self._learned, self._times, self._drafter, self._pruner = learned, times, drafter, pruner
        self._max_nodes = max_nodes
        self._first_way = UNPREPARED if UNPREPARED in ways else PLAIN  # of a step without preparation
        self._packed = packed and pruner is None and not can.prepares  # rows made inside a pass are padded
        self._next: dict[int, int] = {}  # by request: how it drafts in the next step to be planned
        self._recent: dict[int, float] = {}  # by request: draft tokens of the largest recent tree
        self._since: dict[int, tuple[int, int]] = {}  # by batch: steps that attached rows, and how many may in a row
        self._seconds_of: dict[tuple[Kind, int, int], tuple[np.ndarray, list[float]]] = {}  # see `_seconds`

    def plan(self, requests: Sequence[RequestState], most: int) -> StepPlan:
        with self._learned.lock:
            takes = [request.drafting and request.remaining > 1 for request in requests]
            ways = [self._next.get(request.id, self._first_way) for request in requests]
            if any(request.id not in self._next for request in requests):
                self._policy.resume()
            next_way = self._decide(len(requests))
            self._next.update((request.id, next_way) for request in requests)
            most = min(self._max_nodes, most)
            budgets = [
                min(int(self._budget(request, way, len(requests))), most) if take and way != PLAIN else 0
                for request, way, take in zip(requests, ways, takes, strict=True)
            ]
            return StepPlan(requests, budgets, [take and next_way == PREPARED for take in takes], decisions=ways)

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        attached = plan.prepares_any
        if trees.width == 1:
            return replace(plan, trees=trees, attach_to=1 if attached else None)
        with self._learned.lock:
            logp = _draft_tokens(trees)
            falling = all(a >= b for own in logp for a, b in pairwise(own))
            known = self._learned.statistics.chances()
            chances = [[known[cell] for cell in cells_of(own if falling else sorted(own)[::-1])] for own in logp]
            kind, batch = self._kind(attached), trees.batch
            drafting = self._drafting(plan)
            seconds = [drafting + time for time in self._seconds(kind, batch, 1)[batch:]]
            sizes = choose(chances, seconds, packed=self._packed)
            for request, size in zip(plan.requests, sizes, strict=True):
                self._recent[request.id] = max(size, RECENT * self._recent.get(request.id, FIRST_TREE))
            if any(size < whole - 1 for size, whole in zip(sizes, trees.sizes, strict=True)):
                trees = trees.first(sizes) if falling else trees.best(sizes)
            gains = [sum(own[:size]) for own, size in zip(chances, sizes, strict=True)]
            attach_to = self._attach_to(trees) if attached else None
            return replace(plan, trees=trees, gains=gains, attach_to=attach_to)

    def observe(self, plan: StepPlan, outcome: Outcome) -> None:
        with self._learned.lock:
            if outcome.seconds is not None:
                self._observe_times(plan, outcome, outcome.seconds)
            if any(plan.budgets):
                self._record(plan, outcome)
                self._count(plan, outcome)

    def end(self, request: RequestState) -> None:
        with self._learned.lock:
            self._next.pop(request.id, None)
            self._recent.pop(request.id, None)

    def _budget(self, request: RequestState, way: int, batch: int) -> float:
        """Return how many draft tokens to ask for: more than recent trees had, so that they can grow."""
        cheap = self._times.drafting(batch, way) < CHEAP * self._times.plain(batch)
        return (1 + cheap) * self._recent.get(request.id, FIRST_TREE) + MORE

    def _decide(self, batch: int) -> int:
        """Return how the requests draft in the step after the one being planned.

        Some steps leave attached rows out. They keep the time of plain passes current, to which drafting is compared.
        """
        way = self._policy.next()
        since, most = self._since.get(batch, (0, BARE_FIRST))
        if way == PREPARED and since >= most:
            self._since[batch] = 0, min(2 * most, BARE_LAST)
            return self._first_way
        self._since[batch] = since + 1 if way == PREPARED else 0, most
        return way

    def _kind(self, attached: bool) -> Kind:
        return Kind.ATTACHED if attached else Kind.TREES if self._pruner is None else Kind.PRUNED

    def _seconds(self, kind: Kind, batch: int, attach_to: int | None) -> list[float]:
        """Return seconds of a step from its pass on, for trees of 0, 1, 2, ... nodes in all."""
        attach_to = 0 if attach_to is None else attach_to
        table = self._times.curve(batch, kind).table
        held = self._seconds_of.get((kind, batch, attach_to))
        if held is None or held[0] is not table:
            rows = self._rows(kind, batch, np.arange(batch * (1 + self._max_nodes) + 1), attach_to or None)
            held = table, self._times.curve(batch, kind).look_up(rows).tolist()
            self._seconds_of[kind, batch, attach_to] = held
        return held[1]

    def _rows(self, kind: Kind, batch: int, nodes: np.ndarray, attach_to: int | np.ndarray | None) -> np.ndarray:
        """Return rows through all layers, by the number of nodes of all trees."""
        rows = nodes
        if kind is Kind.ATTACHED:
            rows = self._drafter.rows(rows, batch, None if attach_to is None else batch * attach_to)
        if self._pruner is not None:
            rows = self._pruner.worth.rows(rows)
        whole: np.ndarray = np.rint(rows).astype(np.int64)
        return whole

    def _drafting(self, plan: StepPlan) -> float:
        """Return seconds of drafting before the pass."""
        return max((self._times.drafting(len(plan.requests), way) for way in _ways_used(plan)), default=0.0)

    def _attach_to(self, trees: TokenTree) -> int:
        """Return how many nodes of each tree get rows: as many as hardly lengthen the pass over rows at the root alone.

        A draft prepared at the root loses only the depth of the draft tokens accepted last.
        """
        batch, width = trees.batch, trees.width
        rows = self._rows(Kind.ATTACHED, batch, np.full(width, batch * width), np.arange(1, width + 1))
        seconds = self._times.curve(batch, Kind.ATTACHED).look_up(rows)
        return int(np.count_nonzero(seconds <= (1 + HARDLY) * seconds[0]))

    def _observe_times(self, plan: StepPlan, outcome: Outcome, seconds: float) -> None:
        batch, rows = len(plan.requests), outcome.rows
        kind = Kind.ATTACHED if outcome.attached else Kind.PRUNED if outcome.pruned else Kind.TREES
        if kind is not Kind.TREES:
            rows = int(self._rows(kind, batch, np.array(rows), plan.attach_to))
        self._times.observe(batch, kind, rows, seconds - outcome.drafting)
        used = _ways_used(plan)
        if len(used) == 1:
            self._times.observe_drafting(batch, used.pop(), outcome.drafting)

    def _record(self, plan: StepPlan, outcome: Outcome) -> None:
        """Record the accepted draft tokens of each way, less the time that they took."""
        trees = plan.trees
        assert trees is not None
        batch = len(plan.requests)
        plain = self._times.plain(batch)
        seconds = self._seconds(self._kind(outcome.attached), batch, plan.attach_to)
        nodes = sum(trees.sizes) if self._packed else batch * trees.width
        bare, whole = seconds[batch], seconds[nodes]
        gains = plan.gains or [0.0] * batch
        hoped = sum(gains) or 1.0
        drafting = self._drafting(plan) / sum(budget > 0 for budget in plan.budgets)
        token = plain / batch  # seconds that a token is worth
        advantages: dict[int, float] = {}
        for b, way in enumerate(plan.decisions):
            if plan.budgets[b]:
                # The time of rows is shared by expected gain and not by row, as it has steps.
                spent = (whole - bare) * gains[b] / hoped + (bare - plain) / batch + drafting
                # The mean of expected and real gain: the first varies less, the second follows a drafter that changes.
                gain = (gains[b] + max(len(outcome.accepted[b]) - 1, 0)) / 2
                advantages[way] = advantages.get(way, 0.0) + gain - spent / token
        for way, advantage in advantages.items():
            self._policy.record(way, advantage / batch)  # the mean, so that chance counts alike in all sizes

    def _count(self, plan: StepPlan, outcome: Outcome) -> None:
        """Count verified and accepted draft tokens."""
        trees = plan.trees
        assert trees is not None
        for logp, path in zip(_draft_tokens(trees), outcome.accepted, strict=True):
            if logp:
                self._learned.statistics.add(cells_of(logp), [node - 1 for node in path if node])


def _ways_used(plan: StepPlan) -> set[int]:
    """Return the decisions under which requests draft."""
    return {way for way, budget in zip(plan.decisions, plan.budgets, strict=True) if budget}


def _draft_tokens(trees: TokenTree) -> list[list[float]]:
    """Return log-probabilities of each tree's draft tokens."""
    return [row[1:size] for row, size in zip(trees.logp.tolist(), trees.sizes, strict=True)]
