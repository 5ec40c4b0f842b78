"""Replay: the engine's loop on recorded texts, with the real drafters and shapes and without the model.

A pass is replaced by looking the next tokens up in the recorded answer, and its time by a clock; everything else is
what decoding does, call for call: a drafter drafts, a shape sizes, and both learn from what came. With trees of fixed
size the acceptance is that of the same run live. Trees sized by cost depend on what steps take: with the times of a
real run (`Times`) they are its trees, with those of the measured curve they are as good as that predicts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from draftree.drafting import Drafter, Merge
from draftree.drafting.base import Attachment, Context, Step
from draftree.drafting.groups import Groups, Spawners
from draftree.drafting.in_model import InModelDrafter
from draftree.engine import RequestStats
from draftree.host.cost import StepCost
from draftree.shaping import Shape
from draftree.shaping.best_first import OffPath, best_first
from draftree.tree import TokenTree
from draftree.tuning.record import Pace, Text
from draftree.tuning.shapes import Clocked, Sizing, Spent

_ids = itertools.count(-2, -1)  # no request of an engine has them


def _no_rows(spawners: Spawners) -> Attachment:
    raise NotImplementedError("a replay attaches no rows")


class RecordedHeads(Drafter):
    """A drafter inside the model, its guesses read from the record instead of from a pass.

    Args:
        name: of the record.
        drafter: the real one: its rows, its budget and which of its nodes look ahead.
    """

    prepares: ClassVar[bool] = True

    def __init__(self, name: str, drafter: InModelDrafter) -> None:
        self.name = name  # type: ignore[misc]
        self.text: Text | None = None
        self.max_nodes = drafter.max_nodes
        self._inner = drafter
        self._off_path = OffPath()
        self._held: tuple[int, np.ndarray, np.ndarray] | None = None
        grouped = "groups" in drafter.settings
        self._groups = Groups(drafter.settings["groups"], _no_rows) if grouped else None

    def rows(self, nodes: Any, requests: int = 1, spawning: Any = None) -> Any:
        """See `Drafter.rows`."""
        return self._inner.rows(nodes, requests, spawning)

    def draft(self, requests: Sequence[Context], budgets: Sequence[int]) -> TokenTree:
        """See `Drafter.draft`."""
        (request,) = requests
        if self._held is None or self._held[0] != len(request.tokens):
            return TokenTree.roots(torch.tensor([request.tokens[-1]]))
        _, tokens, logp = self._held
        if request.room <= self._inner.depth:
            logp = logp.copy()
            logp[max(request.room - 1, 0) :] = -np.inf
        return best_first([request.tokens[-1]], tokens[None], logp[None], budgets, self.source, self._off_path.factor)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`."""
        (request,) = step.requests
        if request.resting or request.room <= 1 or self.text is None:
            return
        at, gone = len(request.tokens), 0
        if self._groups is not None:
            _, passed = self._groups.find(step, torch.tensor([step.accepted[0][-1]]))
            gone = 0 if passed is None else int(passed)
        found = self.text.guesses[self.name].get(at - gone)
        if found is None or gone >= len(found[0]):
            return
        tokens, logp = found
        if gone:  # rows that speak for an ancestor have that much less to say
            tokens, logp = (np.concatenate([part[gone:], np.zeros_like(part[:gone])]) for part in (tokens, logp))
            logp[len(logp) - gone :] = -np.inf
        held = self._held
        if held is not None and held[0] < len(request.tokens) - 1:
            self._off_path.learn(held[1], held[2], request.tokens[held[0] :])
        self._held = at, tokens, logp

    def end(self, request: Context) -> None:
        """See `Drafter.end`."""
        self._held = None


@dataclass(slots=True)
class Replayed:
    """What a replay predicts.

    Attributes:
        stats: counts of all texts together.
        by_set: of each set.
        seconds: of answering all, prompts included.
    """

    stats: RequestStats = field(default_factory=RequestStats)
    by_set: dict[str, RequestStats] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.stats.emitted / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """The clock of a real run.

    Attributes:
        curve: of a step by its rows, as it was before the first step.
        steps: seconds of the pass and of the whole step, in order, of the steps that the shape was told of.
        rested: the same of those of which it wanted to hear nothing more.
    """

    curve: StepCost
    steps: list[Spent]
    rested: list[Spent] = field(default_factory=list)

    @classmethod
    def of(cls, shape: Clocked) -> Times:
        """The times that a shape kept."""
        assert shape.first is not None
        return cls(shape.first, shape.taken, shape.rests_taken)


def replay(
    texts: Sequence[Text],
    drafter: Drafter | None,
    shape: Shape | None,
    pace: Pace,
    new: int,
    eos_token_ids: Sequence[int],
    *,
    work: float | None = None,
    times: Times | None = None,
) -> Replayed:
    """Answer `texts` from their records.

    Args:
        texts: in the order of the run that is predicted.
        drafter: such as `Lookahead`, or `RecordedHeads`, or `Merge` of them; it learns. None for plain decoding.
        shape: sizes the trees; it learns.
        pace: what steps take.
        new: most tokens of an answer.
        eos_token_ids: the model's.
        work: seconds of guessing and learning in each step that guesses; None takes what they take here.
        times: what the shape is told that steps took, in place of `pace`; what is predicted to be spent is not theirs.
    """
    found = Replayed()
    cost, sizing = pace.cost(), None
    if drafter is not None and shape is not None:
        drafter.bind(None, eos_token_ids=tuple(eos_token_ids))  # type: ignore[arg-type]
        # A curve of its own, which the shape bends: what steps take must not depend on what it thinks of them.
        own_curve = pace.cost() if times is None else StepCost(times.curve.rows, times.curve.seconds)
        facts = (iter(()), iter(())) if times is None else (iter(times.steps), iter(times.rested))
        sizing = Sizing(shape, drafter, own_curve, facts)
    heads = _heads_of(drafter)
    own = sum(pace.own[head.name] for head in heads)
    for text in texts:
        for head in heads:
            head.text = text
        stats, seconds = _answer(text, drafter, sizing, pace, cost, new, own, work)
        found.stats.add(stats)
        found.by_set.setdefault(text.task.prompt.set, RequestStats()).add(stats)
        found.seconds += seconds
    return found


def _heads_of(drafter: Drafter | None) -> list[RecordedHeads]:
    parts = drafter.drafters if isinstance(drafter, Merge) else (drafter,)
    return [part for part in parts if isinstance(part, RecordedHeads)]


def _answer(
    text: Text,
    drafter: Drafter | None,
    sizing: Sizing | None,
    pace: Pace,
    cost: Any,
    new: int,
    own: float,
    work: float | None,
) -> tuple[RequestStats, float]:
    request = Context(next(_ids), list(text.task.ids), len(text.task.ids), new)
    stats, spent = RequestStats(), pace.prompt
    if drafter is not None:
        drafter.begin(request)
    while stats.emitted < len(text.answer):
        begin = time.thread_time()  # what else the machine does meanwhile is not the drafter's
        first = not stats.steps
        drafted = None if sizing is None else sizing.trees(request)
        trees = TokenTree.roots(torch.tensor([request.tokens[-1]])) if drafted is None else drafted
        left = text.answer[stats.emitted :]
        nodes = trees.walk(0, left)
        said = left[: len(nodes)]  # the draft tokens that hold, and one more
        guesses = [*nodes[1:], None][: len(said)]
        attached = sizing is not None and sizing.attached(request)
        request.tokens += said
        request.room -= len(said)
        stats.count(guesses, trees.sizes[0] - 1)
        if drafter is not None and sizing is not None:
            sizing.learn(request, nodes[: len(said)], trees)
            if type(drafter).observe is not Drafter.observe:
                step: Any = Step([request], trees, None, [0], 0, [nodes[: len(said)]], [said])  # type: ignore[arg-type]
                drafter.observe(step)
        more = pace.aside
        if drafted is not None:
            more += time.thread_time() - begin if work is None else work
        rows = passed = trees.sizes[0]
        more += pace.drafted if rows > 1 else 0.0
        if attached and sizing is not None:
            passed = sizing.rows(request, rows)
            more += own
        seconds = float(cost.of(passed))
        if not first:  # the prompt's pass is told apart
            spent += seconds + more
            if sizing is not None:
                sizing.took(rows, (seconds, seconds + more), plain=passed == rows, attached=attached)
    if sizing is not None:
        sizing.end(request)
    if drafter is not None:
        drafter.end(request)
    return stats, spent
