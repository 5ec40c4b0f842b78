"""`DynamicTree` at work: plan a step, trim its trees, learn from it.

Each step's draft tokens get the probability with which such ones were accepted so far (`Ledger`), and as many of them
are verified as the time of their rows is worth (`choose`). What drafting itself takes, in the drafter's work and in
rows that a drafter inside the model attaches, is set against what it brings, for each request (`Modes`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from draftree.drafting.base import Context, Drafter, StepPlan
from draftree.shaping.base import Outcome, Sizer
from draftree.shaping.by_rank import ByRank
from draftree.shaping.ledger import FADING_OWN, Ledger, cells_of
from draftree.shaping.modes import PLAIN, PREPARED, UNPREPARED, Modes
from draftree.shaping.planner import choose, leads
from draftree.shaping.step_times import Kind, StepTimes
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.pruning.early import EarlyPruning

ASK_FACTOR, ASK_LEAST = 2.0, 8  # draft tokens asked for: this times the largest tree of late, and some
RECENT = 0.9  # how fast the largest tree of late fades, by step
PROBE_AFTER = 4  # steps of a size, before sizes next to it that were never tried are
GAIN_FIRST, GAIN_RATE = 0.5, 0.1  # accepted draft tokens a step, before any was seen; weight of a step in it


class Learned:
    """What is known of a drafter's draft tokens, over all requests and engines.

    Args:
        acceptance: of `DynamicTree`.
    """

    def __init__(self, acceptance: str) -> None:
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self.by_rank = None if acceptance == "calibrated" else ByRank(conditional=acceptance == "by-rank")
        self.modes: Modes | None = None
        self.gain = GAIN_FIRST
        self.steps = 0


class _State:
    """What is known of one request."""

    __slots__ = ("gain", "ledger", "modes", "next", "way")

    def __init__(self, modes: Modes, first: int, gain: float) -> None:
        self.ledger = Ledger(FADING_OWN)
        self.modes = modes
        self.way, self.next = PLAIN, first  # of the step that is planned, and of the one behind it
        self.gain = gain


class DynamicSizer(Sizer):
    """See `DynamicTree`.

    Args:
        learned: what is shared with other engines.
        times: of steps.
        drafter: drafts.
        pruner: drops draft tokens inside the pass; None for none.
        max_nodes: most draft tokens per request.
        packed: whether only real rows cost, and not the padding of smaller trees.
    """

    def __init__(
        self,
        learned: Learned,
        times: StepTimes,
        drafter: Drafter,
        pruner: EarlyPruning | None,
        *,
        max_nodes: int,
        packed: bool,
    ) -> None:
        can = drafter.capabilities
        ways = ((UNPREPARED,) if can.unprepared or not can.prepares else ()) + ((PREPARED,) if can.prepares else ())
        with learned.lock:
            if learned.modes is None:
                learned.modes = Modes(ways)
        self._learned, self._times, self._drafter, self._pruner = learned, times, drafter, pruner
        self._max_nodes, self._ways = max_nodes, ways
        self._packed = packed and pruner is None and not can.prepares  # what is done inside a pass is padded
        self._states: dict[int, _State] = {}
        self._recent = 0.0  # the largest tree of late

    # ---------------------------------------------------------------- the contract

    def plan(self, requests: Sequence[Context], most: int, *, closed: bool = False) -> StepPlan:
        """See `Sizer.plan`."""
        with self._learned.lock:
            states = [self._state(request) for request in requests]
            ahead = leads([r.room for r in requests], [1 + s.gain for s in states]) if closed else [False] * len(states)
            for state in states:
                state.way, state.next = state.next, state.modes.next()
            budget = min(self._max_nodes, most, int(ASK_FACTOR * self._recent) + ASK_LEAST)
            takes = [r.drafting and r.room > 1 and not lead for r, lead in zip(requests, ahead, strict=True)]
            return StepPlan(
                requests,
                [budget if take and s.way != PLAIN else 0 for take, s in zip(takes, states, strict=True)],
                [take and s.next == PREPARED for take, s in zip(takes, states, strict=True)],
            )

    def trim(self, plan: StepPlan, trees: TokenTree) -> StepPlan:
        """See `Sizer.trim`."""
        with self._learned.lock:
            attached = plan.prepares_any
            if trees.width == 1:
                return replace(plan, trees=trees, attach_to=1 if attached else None)
            trees, chances = self._chances(plan, trees)
            kind = self._kind(attached)
            nodes = np.arange(trees.batch, trees.batch * (1 + self._max_nodes) + 1)
            seconds = self._seconds(kind, trees.batch, nodes, 1) + self._drafting(plan)
            choice = choose(chances, seconds, packed=self._packed)
            sizes = choice.sizes
            if trees.batch == 1:
                sizes = [self._probed(sizes[0], len(chances[0]), kind)]
            self._recent = max(max(sizes), RECENT * self._recent)
            if any(n < size - 1 for n, size in zip(sizes, trees.sizes, strict=True)):
                trees = trees.best(sizes)
            gains = [float(own[:n].sum()) for own, n in zip(chances, sizes, strict=True)]
            attach_to = self._attach_to(plan, trees, chances) if attached else None
            return replace(plan, trees=trees, gains=gains, attach_to=attach_to)

    def observe(self, plan: StepPlan, outcome: Outcome) -> None:
        """See `Sizer.observe`."""
        with self._learned.lock:
            self._learned.steps += 1
            if outcome.seconds is not None:
                self._observe_times(plan, outcome)
            if plan.trees is None or not any(plan.budgets):
                return
            self._book(plan, outcome)
            self._count(plan, outcome)

    def end(self, request: Context) -> None:
        """See `Sizer.end`."""
        with self._learned.lock:
            self._states.pop(request.id, None)
            if self._learned.by_rank is not None:
                self._learned.by_rank.forget(request)

    # ---------------------------------------------------------------- what is expected

    def _state(self, request: Context) -> _State:
        state = self._states.get(request.id)
        if state is None:
            learned = self._learned
            first = UNPREPARED if UNPREPARED in self._ways else PLAIN  # nothing is prepared for a first step
            state = self._states[request.id] = _State(Modes(self._ways, learned.modes), first, learned.gain)
        return state

    def _chances(self, plan: StepPlan, trees: TokenTree) -> tuple[TokenTree, list[np.ndarray]]:
        """The trees, best draft tokens first, and the probability of each draft token that it is accepted."""
        by_rank = self._learned.by_rank
        if by_rank is not None:
            by_rank.remember(plan.requests, trees)
            trees = by_rank.weighed(trees).best([size - 1 for size in trees.sizes])
            worth = np.exp(trees.logp.numpy(force=True))
            return trees, [worth[b, 1:size] for b, size in enumerate(trees.sizes)]
        logp = trees.logp.numpy(force=True)
        shares = self._learned.ledger.shares()
        found = []
        for b, (request, size) in enumerate(zip(plan.requests, trees.sizes, strict=True)):
            falling = -np.sort(-logp[b, 1:size])
            found.append(self._states[request.id].ledger.own_shares(shares, cells_of(falling)))
        return trees, found

    def _kind(self, attached: bool) -> Kind:
        return Kind.ATTACHED if attached else Kind.TREES if self._pruner is None else Kind.PRUNED

    def _rows(self, kind: Kind, batch: int, nodes: np.ndarray | int, attach_to: int | np.ndarray | None) -> np.ndarray:
        """Rows through all layers that passes over so many nodes in all amount to."""
        rows: np.ndarray = np.asarray(nodes)
        if kind is Kind.ATTACHED:
            rows = self._drafter.rows(rows, batch, None if attach_to is None else batch * attach_to)
        if self._pruner is not None:
            rows = self._pruner.rows(rows)
        return np.rint(rows).astype(np.int64)

    def _seconds(
        self, kind: Kind, batch: int, nodes: np.ndarray | int, attach_to: int | np.ndarray | None
    ) -> np.ndarray:
        """Seconds of passes over so many nodes in all, and of what follows them."""
        rows = self._rows(kind, batch, nodes, attach_to)
        return self._times.curve(batch, kind).table(int(rows.max()) + 1)[rows]

    def _drafting(self, plan: StepPlan) -> float:
        ways = {self._states[r.id].way for r, budget in zip(plan.requests, plan.budgets, strict=True) if budget}
        return max((self._times.drafting(len(plan.requests), way) for way in ways), default=0.0)

    def _probed(self, size: int, most: int, kind: Kind) -> int:
        """`size`, or the next one that was never tried: kernels have steps, and a curve between two points has none."""
        if kind is not Kind.TREES or not self._times.learns:
            return size
        curve = self._times.curve(1)
        if curve.seen(1 + size) >= PROBE_AFTER:
            for other in (size + 1, size - 1, size + 2):
                if 0 < other <= most and not curve.seen(1 + other):
                    return other
        return size

    def _attach_to(self, plan: StepPlan, trees: TokenTree, chances: Sequence[np.ndarray]) -> int:
        """How many nodes of each tree are worth rows of the drafter's: the likeliest to be accepted last have them.

        A draft that was prepared at the node accepted last brings what drafts bring of late; one prepared further up
        has said part of it already, and counts half.
        """
        batch, width = trees.batch, trees.width
        ends = np.zeros((batch, width))
        ends[:, 0] = 1.0
        parents = trees.parents.numpy(force=True)
        for b, (own, size) in enumerate(zip(chances, trees.sizes, strict=True)):
            ends[b, 1:size] = own[: size - 1]
            np.subtract.at(ends[b], parents[b, 1:size], own[: size - 1])
        ends[:, 1:] = -np.sort(-ends[:, 1:].clip(min=0.0), axis=1)
        covered = ends.cumsum(1).sum(0)  # expected number of trees that end at one of the first k nodes
        counts = np.arange(1, width + 1)
        seconds = self._seconds(Kind.ATTACHED, batch, batch * width, counts)
        price = self._times.plain(batch) / batch  # seconds that a token is worth
        return 1 + int((0.5 * covered * self._learned.gain * price - seconds).argmax())

    # ---------------------------------------------------------------- what is learned

    def _observe_times(self, plan: StepPlan, outcome: Outcome) -> None:
        assert outcome.seconds is not None
        batch = len(plan.requests)
        kind = Kind.ATTACHED if outcome.attached else Kind.PRUNED if outcome.pruned else Kind.TREES
        rows = int(self._rows(kind, batch, outcome.rows, plan.attach_to)) if kind is not Kind.TREES else outcome.rows
        self._times.observe(batch, kind, rows, outcome.seconds - outcome.drafting)
        if any(plan.budgets):
            ways = {self._states[r.id].way for r, budget in zip(plan.requests, plan.budgets, strict=True) if budget}
            if len(ways) == 1:
                self._times.observe_drafting(batch, ways.pop(), outcome.drafting)

    def _book(self, plan: StepPlan, outcome: Outcome) -> None:
        """Set what each request's draft tokens bring against the time that they take."""
        assert plan.trees is not None
        batch = len(plan.requests)
        plain = self._times.plain(batch)
        drafted = sum(budget > 0 for budget in plan.budgets)
        kind = self._kind(outcome.attached)
        whole = float(self._seconds(kind, batch, outcome.rows, plan.attach_to))
        bare = float(self._seconds(kind, batch, batch, 1))
        rows = sum(plan.trees.sizes) - batch
        each = (whole - bare) / max(rows, 1)  # seconds of a draft token
        aside = (bare - plain) / batch + self._drafting(plan) / drafted
        gains = plan.gains or [0.0] * batch
        for b, request in enumerate(plan.requests):
            state = self._states[request.id]
            if not plan.budgets[b] or (state.way == PREPARED and not plan.gains):
                continue
            seconds = (plan.trees.sizes[b] - 1) * each + aside
            advantage = gains[b] - seconds * batch / plain
            for modes in (state.modes, self._learned.modes):
                assert modes is not None
                modes.book(state.way, advantage, step=self._learned.steps)
            came = max(len(outcome.accepted[b]) - 1, 0)
            state.gain += GAIN_RATE * (came - state.gain)
            self._learned.gain += GAIN_RATE / batch * (came - self._learned.gain)

    def _count(self, plan: StepPlan, outcome: Outcome) -> None:
        """Tell the ledgers which draft tokens were verified, and which of them accepted."""
        trees = plan.trees
        assert trees is not None
        if trees.width == 1:
            return
        if self._learned.by_rank is not None:
            self._learned.by_rank.compare(plan.requests)
            return
        logp = trees.logp.numpy(force=True)
        for b, (request, size) in enumerate(zip(plan.requests, trees.sizes, strict=True)):
            if size == 1:
                continue
            order = np.argsort(-logp[b, 1:size], kind="stable")
            cells = np.empty(size - 1, np.int64)
            cells[order] = cells_of(logp[b, 1:size][order])
            accepted = cells[[node - 1 for node in outcome.accepted[b] if node]]
            for ledger in (self._states[request.id].ledger, self._learned.ledger):
                ledger.add(cells, accepted)
