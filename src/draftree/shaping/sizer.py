"""`DynamicTree` in one engine: plan a step, trim its trees, learn from it.

1. Plan: the pause policy decides who drafts; budgets follow the sizes of recent trees.
2. Trim: each draft token gets the share of such tokens that were accepted (`AcceptanceStatistics`), and as many are
   verified as give most tokens per second (`choose`).
3. Observe: step times, acceptance statistics and the pause policy learn from the outcome.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from draftree.drafting.acceptance_statistics import FADING_OWN, AcceptanceStatistics, cells_of
from draftree.drafting.base import Drafter, RequestState, StepPlan
from draftree.shaping.base import Outcome, Sizer
from draftree.shaping.pause import PLAIN, PREPARED, UNPREPARED, PausePolicy
from draftree.shaping.planner import choose, lead
from draftree.shaping.step_times import Kind, StepTimes
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.pruner import Pruner

MORE = 2  # draft tokens asked for above the largest of the request's recent trees
CHEAP = 0.05  # largest share of a plain step in drafting at which twice that tree is asked for
RECENT = 0.9  # fading of the largest recent tree per step
GAIN_RATE = 0.1  # weight of a step in the mean of accepted draft tokens
BARE_FIRST, BARE_LAST = 16, 128  # steps with attached rows before one without them
HARDLY = 0.05  # share by which rows at more nodes than the root may lengthen a pass
GAIN_FIRST = 0.5  # prior of accepted draft tokens per step
FIRST_TREE = 4.0  # prior of the largest recent tree


class Learned:
    """What is known of a drafter's draft tokens over all requests and engines; `lock` guards it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.statistics = AcceptanceStatistics()
        self.policy: PausePolicy | None = None  # made by the first engine, which knows the drafter's ways
        self.gain = GAIN_FIRST  # accepted draft tokens per step

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())


class _OfRequest:
    """The same of one request, and how it drafts next."""

    __slots__ = ("chances", "gain", "next", "policy", "recent", "statistics")

    def __init__(self, policy: PausePolicy, first: int, gain: float) -> None:
        self.statistics = AcceptanceStatistics(FADING_OWN)
        self.policy, self.gain = policy, gain
        self.next = first  # way of drafting in the next step to be planned
        self.recent = FIRST_TREE  # draft tokens of the largest recent tree
        self.chances: list[float] | None = None  # acceptance probability by cell; None after learning


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
        ways = ((UNPREPARED,) if can.unprepared or not can.prepares else ()) + ((PREPARED,) if can.prepares else ())
        with learned.lock:
            if learned.policy is None:
                learned.policy = PausePolicy(ways)
            self._together = PausePolicy(ways, learned.policy)  # of batches
        self._learned, self._times, self._drafter, self._pruner = learned, times, drafter, pruner
        self._max_nodes, self._ways = max_nodes, ways
        self._packed = packed and pruner is None and not can.prepares  # rows made inside a pass are padded
        self._states: dict[int, _OfRequest] = {}
        self._since: dict[int, tuple[int, int]] = {}  # by requests: steps that attached rows, and how many may in a row
        self._seconds_of: dict[tuple[Kind, int, int], tuple[np.ndarray, list[float]]] = {}  # see `_seconds`

    # ---------------------------------------------------------------- the contract

    def plan(self, requests: Sequence[RequestState], most: int, *, closed: bool = False) -> StepPlan:
        with self._learned.lock:
            states = [self._state(request) for request in requests]
            takes = [request.drafting and request.remaining > 1 for request in requests]
            if closed and len(requests) > 1:
                leads = lead([request.remaining for request in requests], [1 + state.gain for state in states])
                takes = [take and not ahead for take, ahead in zip(takes, leads, strict=True)]
            ways, next_way = [state.next for state in states], self._decide(requests)
            for state in states:
                state.next = next_way
            most = min(self._max_nodes, most)
            budgets = [
                min(int(self._budget(state, way, len(states))), most) if take and way != PLAIN else 0
                for state, way, take in zip(states, ways, takes, strict=True)
            ]
            return StepPlan(requests, budgets, [take and next_way == PREPARED for take in takes], decisions=ways)

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        attached = plan.prepares_any
        if trees.width == 1:
            return replace(plan, trees=trees, attach_to=1 if attached else None)
        with self._learned.lock:
            logp = _draft_tokens(trees)
            falling = all(a >= b for own in logp for a, b in pairwise(own))
            chances = self._chances(plan, logp if falling else [sorted(own, reverse=True) for own in logp])
            kind, batch = self._kind(attached), trees.batch
            drafting = self._drafting(plan)
            seconds = [drafting + time for time in self._seconds(kind, batch, 1)[batch:]]
            sizes = choose(chances, seconds, packed=self._packed)
            for request, size in zip(plan.requests, sizes, strict=True):
                state = self._states[request.id]
                state.recent = max(size, RECENT * state.recent)
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
            for request in plan.requests:
                self._states[request.id].chances = None

    def end(self, request: RequestState) -> None:
        with self._learned.lock:
            self._states.pop(request.id, None)

    def _budget(self, state: _OfRequest, way: int, batch: int) -> float:
        """Return how many draft tokens to ask for: more than recent trees had, so that they can grow."""
        cheap = self._times.drafting(batch, way) < CHEAP * self._times.plain(batch)
        return (1 + cheap) * state.recent + MORE

    @property
    def _first_way(self) -> int:
        """Return the way of a step without preparation."""
        return UNPREPARED if UNPREPARED in self._ways else PLAIN

    def _policy(self, requests: Sequence[RequestState]) -> PausePolicy:
        """Return the pause policy of these requests."""
        return self._together if len(requests) > 1 else self._states[requests[0].id].policy

    def _decide(self, requests: Sequence[RequestState]) -> int:
        """Return how the requests draft in the step after the one being planned.

        Some steps leave attached rows out. They keep the time of plain passes current, to which drafting is compared.
        """
        batch, way = len(requests), self._policy(requests).next()
        since, most = self._since.get(batch, (0, BARE_FIRST))
        if way == PREPARED and since >= most:
            self._since[batch] = 0, min(2 * most, BARE_LAST)
            return self._first_way
        self._since[batch] = since + 1 if way == PREPARED else 0, most
        return way

    # ---------------------------------------------------------------- what is expected

    def _state(self, request: RequestState) -> _OfRequest:
        state = self._states.get(request.id)
        if state is None:
            learned = self._learned
            state = self._states[request.id] = _OfRequest(
                PausePolicy(self._ways, learned.policy), self._first_way, learned.gain
            )
        return state

    def _chances(self, plan: StepPlan, logp: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the acceptance probabilities of draft tokens of these log-probabilities, tree by tree."""
        found = []
        for request, own in zip(plan.requests, logp, strict=True):
            state = self._states[request.id]
            if state.chances is None:
                state.chances = self._learned.statistics.chances(state.statistics)
            chances = state.chances
            found.append([chances[cell] for cell in cells_of(own)])
        return found

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

    # ---------------------------------------------------------------- what is learned

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
        """Record each request's accepted draft tokens less the time that they took."""
        trees, everyone = plan.trees, self._learned.policy
        assert trees is not None
        assert everyone is not None
        batch = len(plan.requests)
        plain = self._times.plain(batch)
        seconds = self._seconds(self._kind(outcome.attached), batch, plan.attach_to)
        nodes = sum(trees.sizes) if self._packed else batch * trees.width
        bare, whole = seconds[batch], seconds[nodes]
        gains = plan.gains or [0.0] * batch
        hoped = sum(gains) or 1.0
        drafted = sum(budget > 0 for budget in plan.budgets)
        token = plain / batch  # seconds that a token is worth
        drafting = self._drafting(plan)
        advantages: dict[int, float] = {}
        for b, (request, way) in enumerate(zip(plan.requests, plan.decisions, strict=True)):
            state = self._states[request.id]
            if not plan.budgets[b]:
                continue
            # The time of rows is shared by expected gain and not by row, as it has steps.
            spent = (whole - bare) * gains[b] / hoped + (bare - plain) / batch + drafting / drafted
            # The mean of expected and real gain: the first varies less, the second follows a drafter that changes.
            came = max(len(outcome.accepted[b]) - 1, 0)
            advantages[way] = advantages.get(way, 0.0) + (gains[b] + came) / 2 - spent / token
            state.gain += GAIN_RATE * (came - state.gain)
            self._learned.gain += GAIN_RATE / drafted * (came - self._learned.gain)
        own = self._policy(plan.requests)
        for way, advantage in advantages.items():
            own.record(way, advantage / batch)  # the mean of the batch, so that chance counts alike in all sizes
            everyone.record(way, advantage / batch)

    def _count(self, plan: StepPlan, outcome: Outcome) -> None:
        """Count verified and accepted draft tokens."""
        trees = plan.trees
        assert trees is not None
        if trees.width > 1:
            for request, logp, path in zip(plan.requests, _draft_tokens(trees), outcome.accepted, strict=True):
                if logp:
                    cells = cells_of(logp)
                    accepted = [node - 1 for node in path if node]
                    self._learned.statistics.add(cells, accepted)
                    self._states[request.id].statistics.add(cells, accepted)


def _ways_used(plan: StepPlan) -> set[int]:
    """Return the decisions under which requests draft."""
    return {way for way, budget in zip(plan.decisions, plan.budgets, strict=True) if budget}


def _draft_tokens(trees: TokenTree) -> list[list[float]]:
    """Return log-probabilities of each tree's draft tokens."""
    return [row[1:size] for row, size in zip(trees.logp.tolist(), trees.sizes, strict=True)]
