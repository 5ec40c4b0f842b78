"""`DynamicTree` at work: plan a step, trim its trees, learn from it.

Each step's draft tokens get the probability with which such ones were accepted so far
(`AcceptanceStatistics`), and as many of them
are verified as the time of their rows is worth (`choose`). What drafting itself takes, in the drafter's work and in
rows that a drafter inside the model attaches, is set against what it brings, for each request (`Modes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from draftree.drafting.acceptance_statistics import cells_of
from draftree.drafting.base import Drafter, RequestState, StepPlan
from draftree.shaping.base import Outcome, Sizer
from draftree.shaping.learned import Learned, OfRequest
from draftree.shaping.modes import PLAIN, PREPARED, UNPREPARED, Modes
from draftree.shaping.planner import choose, lead
from draftree.shaping.step_times import Kind, StepTimes
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.pruner import Pruner

MORE = 2  # draft tokens that are asked for above the largest of the request's recent trees
CHEAP = 0.05  # part of a plain step that drafting may take for twice that tree to be asked for
RECENT = 0.9  # how fast the largest of the recent trees fades, by step
GAIN_RATE = 0.1  # weight of a step in the mean of accepted draft tokens
LEARN_EVERY = 4  # steps that are learned from together: out of cold caches, one takes as long as four in a row
BARE_FIRST, BARE_LAST = 16, 128  # steps with attached rows after which one goes without
HARDLY = 0.05  # part of a pass's time that rows at more nodes may take more than rows at the root


class DynamicSizer(Sizer):
    """See `DynamicTree` and `Shape.bind`; what is `learned` is shared with other engines."""

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
            if learned.modes is None:
                learned.modes = Modes(ways)
            self._together = Modes(ways, learned.modes)  # of batches
        self._learned, self._times, self._drafter, self._pruner = learned, times, drafter, pruner
        self._max_nodes, self._ways = max_nodes, ways
        self._packed = packed and pruner is None and not can.prepares  # what is done inside a pass is padded
        self._states: dict[int, OfRequest] = {}
        self._since: dict[int, tuple[int, int]] = {}  # by requests: steps that attached rows, and how many may in a row
        self._unread: list[tuple[StepPlan, Outcome]] = []  # steps that are still to be learned from
        self._seconds_of: dict[tuple[Kind, int, int], tuple[np.ndarray, list[float]]] = {}  # see `_seconds`

    # ---------------------------------------------------------------- the contract

    def plan(self, requests: Sequence[RequestState], most: int, *, closed: bool = False) -> StepPlan:
        with self._learned.lock:
            states = [self._state(request) for request in requests]
            takes = [request.drafting and request.room > 1 for request in requests]
            if closed and len(requests) > 1:
                leads = lead([request.room for request in requests], [1 + state.gain for state in states])
                takes = [take and not ahead for take, ahead in zip(takes, leads, strict=True)]
            ways, next_way = [state.next for state in states], self._decide(requests)
            for state in states:
                state.next = next_way
            most = min(self._max_nodes, most)
            budgets = [
                min(int(self._budget(state, way, len(states))), most) if take and way != PLAIN else 0
                for state, way, take in zip(states, ways, takes, strict=True)
            ]
            return StepPlan(requests, budgets, [take and next_way == PREPARED for take in takes], ways=ways)

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
        self._unread.append((plan, outcome))
        if len(self._unread) >= LEARN_EVERY or self._modes(plan.requests).on_trial:
            self._learn()

    def end(self, request: RequestState) -> None:
        self._learn()
        with self._learned.lock:
            self._states.pop(request.id, None)

    def _budget(self, state: OfRequest, way: int, batch: int) -> float:
        """Draft tokens that the drafter may propose: more than were worth it lately, so that trees can grow."""
        cheap = self._times.drafting(batch, way) < CHEAP * self._times.plain(batch)
        return (1 + cheap) * state.recent + MORE

    @property
    def _first_way(self) -> int:
        """The way of a step that nothing was prepared for."""
        return UNPREPARED if UNPREPARED in self._ways else PLAIN

    def _modes(self, requests: Sequence[RequestState]) -> Modes:
        """What decides how these requests draft."""
        return self._together if len(requests) > 1 else self._states[requests[0].id].modes

    def _decide(self, requests: Sequence[RequestState]) -> int:
        """Decide how the requests draft in the step behind the one being planned; a step of all pauses passes.

        Now and then a step that would attach rows goes without, so that what drafting is compared with stays true: what
        the last pass without them took in a slow moment would else never be found wrong.
        """
        batch, way = len(requests), self._modes(requests).next()
        since, most = self._since.get(batch, (0, BARE_FIRST))
        if way == PREPARED and since >= most:
            self._since[batch] = 0, min(2 * most, BARE_LAST)
            return self._first_way
        self._since[batch] = since + 1 if way == PREPARED else 0, most
        return way

    # ---------------------------------------------------------------- what is expected

    def _state(self, request: RequestState) -> OfRequest:
        state = self._states.get(request.id)
        if state is None:
            learned = self._learned
            state = self._states[request.id] = OfRequest(
                Modes(self._ways, learned.modes), self._first_way, learned.gain
            )
        return state

    def _chances(self, plan: StepPlan, logp: Sequence[Sequence[float]]) -> list[list[float]]:
        """The probabilities that draft tokens of these log-probabilities are accepted, by tree."""
        found = []
        for request, own in zip(plan.requests, logp, strict=True):
            state = self._states[request.id]
            if state.chances is None:
                state.chances = self._learned.ledger.chances(state.ledger)
            chances = state.chances
            found.append([chances[cell] for cell in cells_of(own)])
        return found

    def _kind(self, attached: bool) -> Kind:
        return Kind.ATTACHED if attached else Kind.TREES if self._pruner is None else Kind.PRUNED

    def _seconds(self, kind: Kind, batch: int, attach_to: int | None) -> list[float]:
        """Seconds of passes over trees of 0, 1, 2, ... nodes in all, and of what follows them in a step."""
        attach_to = 0 if attach_to is None else attach_to
        table = self._times.curve(batch, kind).table
        held = self._seconds_of.get((kind, batch, attach_to))
        if held is None or held[0] is not table:
            rows = self._rows(kind, batch, np.arange(batch * (1 + self._max_nodes) + 1), attach_to or None)
            held = table, self._times.curve(batch, kind).look_up(rows).tolist()
            self._seconds_of[kind, batch, attach_to] = held
        return held[1]

    def _rows(self, kind: Kind, batch: int, nodes: np.ndarray, attach_to: int | np.ndarray | None) -> np.ndarray:
        """Rows through all layers that passes over so many nodes in all amount to."""
        rows = nodes
        if kind is Kind.ATTACHED:
            rows = self._drafter.rows(rows, batch, None if attach_to is None else batch * attach_to)
        if self._pruner is not None:
            rows = self._pruner.worth.rows(rows)
        whole: np.ndarray = np.rint(rows).astype(np.int64)
        return whole

    def _drafting(self, plan: StepPlan) -> float:
        """Seconds that the drafter takes before the pass."""
        return max((self._times.drafting(len(plan.requests), way) for way in _ways_used(plan)), default=0.0)

    def _attach_to(self, trees: TokenTree) -> int:
        """How many nodes of each tree get rows attached: as many as make the pass hardly longer than the root alone.

        A draft that was prepared at the root still reaches beyond the draft tokens accepted last; one prepared at the
        last of them reaches further, which made steps a sixth longer at most where it was measured. Rows at more nodes
        cost more than that wherever a pass is not far below its compute bound.
        """
        batch, width = trees.batch, trees.width
        rows = self._rows(Kind.ATTACHED, batch, np.full(width, batch * width), np.arange(1, width + 1))
        seconds = self._times.curve(batch, Kind.ATTACHED).look_up(rows)
        return int(np.count_nonzero(seconds <= (1 + HARDLY) * seconds[0]))

    # ---------------------------------------------------------------- what is learned

    def _learn(self) -> None:
        """Learn from the steps since the last time."""
        unread, self._unread = self._unread, []
        with self._learned.lock:
            for plan, outcome in unread:
                if outcome.seconds is not None:
                    self._observe_times(plan, outcome, outcome.seconds)
                if any(plan.budgets):
                    self._book(plan, outcome)
                    self._count(plan, outcome)
            for state in self._states.values():
                state.chances = None

    def _observe_times(self, plan: StepPlan, outcome: Outcome, seconds: float) -> None:
        batch, rows = len(plan.requests), outcome.rows
        kind = Kind.ATTACHED if outcome.attached else Kind.PRUNED if outcome.pruned else Kind.TREES
        if kind is not Kind.TREES:
            rows = int(self._rows(kind, batch, np.array(rows), plan.attach_to))
        self._times.observe(batch, kind, rows, seconds - outcome.drafting)
        used = _ways_used(plan)
        if len(used) == 1:
            self._times.observe_drafting(batch, used.pop(), outcome.drafting)

    def _book(self, plan: StepPlan, outcome: Outcome) -> None:
        """Set what each request's draft tokens bring against the time that they take."""
        trees, modes = plan.trees, self._learned.modes
        assert trees is not None
        assert modes is not None
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
        booked: dict[int, float] = {}
        for b, (request, way) in enumerate(zip(plan.requests, plan.ways, strict=True)):
            state = self._states[request.id]
            if not plan.budgets[b]:
                continue
            # The time of rows has steps, so each pays for what it brings of them all, and not by the row.
            spent = (whole - bare) * gains[b] / hoped + (bare - plain) / batch + drafting / drafted
            # What is expected moves less by chance, what came is true also of a drafter that has just changed.
            came = max(len(outcome.accepted[b]) - 1, 0)
            booked[way] = booked.get(way, 0.0) + (gains[b] + came) / 2 - spent / token
            state.gain += GAIN_RATE * (came - state.gain)
            self._learned.gain += GAIN_RATE / drafted * (came - self._learned.gain)
        own = self._modes(plan.requests)
        for way, advantage in booked.items():
            own.book(way, advantage / batch)  # a request, so that luck counts alike in batches of every size
            modes.book(way, advantage / batch)

    def _count(self, plan: StepPlan, outcome: Outcome) -> None:
        """Tell the ledgers which draft tokens were verified, and which of them accepted."""
        trees = plan.trees
        assert trees is not None
        if trees.width > 1:
            for request, logp, path in zip(plan.requests, _draft_tokens(trees), outcome.accepted, strict=True):
                if logp:
                    cells = cells_of(logp)
                    accepted = [node - 1 for node in path if node]
                    self._learned.ledger.add(cells, accepted)
                    self._states[request.id].ledger.add(cells, accepted)


def _ways_used(plan: StepPlan) -> set[int]:
    """The ways in which requests draft."""
    return {way for way, budget in zip(plan.ways, plan.budgets, strict=True) if budget}


def _draft_tokens(trees: TokenTree) -> list[list[float]]:
    """Log-probabilities of each tree's draft tokens."""
    return [row[1:size] for row, size in zip(trees.logp.tolist(), trees.sizes, strict=True)]
