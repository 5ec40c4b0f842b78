"""Replay: the engine's loop on recorded texts, with the real drafters and shapes and without the model.

A pass is replaced by looking the next tokens up in the recorded answer, and its time by what such steps took when the
answers were recorded; everything else is what decoding does, call for call: a shape plans, a drafter drafts, and both
learn from what came. With trees of fixed size the acceptance is that of the same run live. Trees sized by cost depend
on what steps take, and are predicted as well as that is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from draftree.drafting import Drafter, Merge
from draftree.drafting.base import Attachment, Capabilities, RequestState, Step, StepPlan
from draftree.drafting.groups import nodes_of, serving
from draftree.drafting.in_model import InModelDrafter
from draftree.engine import RequestStats
from draftree.runner.plan import PassResult
from draftree.runner.target import Target
from draftree.shaping import Shape
from draftree.shaping.base import Outcome, Sizer
from draftree.tree import TokenTree
from draftree.tuning.record import Text, Timing

Clock = Callable[[], float]
NO_PASS = PassResult(torch.empty(0, dtype=torch.float32, device="cpu"), [])  # nothing was computed
_ids = itertools.count(-2, -1)  # no request of an engine has them


class RecordedHeads(InModelDrafter):
    """A drafter inside the model with its settings and rows; draft tokens are those of the record of that name."""

    def __init__(self, name: str, drafter: InModelDrafter) -> None:
        super().__init__(drafter.shapes(), drafter.steps, **drafter.settings)
        self.name = name
        self.text: Text | None = None
        self._inner = drafter
        self._prepared = False  # whether the pass would have the drafter's rows
        self._no_pass = replace(NO_PASS, hidden={drafter.shapes()["layers"]: NO_PASS.logits})

    def _refuse_unknown(self, settings: Mapping[str, Any]) -> None:
        """The real drafter has accepted them."""

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """See `Drafter.bind`: there is no model."""

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """See `InModelDrafter.place`: there are no weights."""

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        return self._inner.rows(nodes, requests, attach_to)

    def plan(self, step: StepPlan) -> Attachment | None:
        """See `Drafter.plan`: no rows, as there is no pass."""
        self._prepared = step.prepares_any
        return None

    def attach(self, trees: TokenTree, attach_to: int | None, dtype: torch.dtype) -> Attachment:
        return Attachment()

    def draft_logits(self, step: Step, paths: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """See `InModelDrafter.draft_logits`: the record has the likeliest tokens in their place."""
        return None

    def observe(self, step: Step) -> None:
        if self._prepared:
            super().observe(replace(step, result=self._no_pass))

    def likeliest(self, step: Step) -> tuple[np.ndarray, np.ndarray] | None:
        """See `InModelDrafter.likeliest`: those of the record."""
        (request,) = step.requests
        gone = 0
        if "groups" in self.settings:
            chosen = nodes_of(step.trees, self.settings["groups"], step.attach_to)
            ((_, gone),) = serving(chosen, step.accepted)
        found = None if self.text is None else self.text.drafts[self.name].get(len(request.tokens) - gone)
        if found is None or gone >= len(found[0]):
            return None
        tokens, logp = found
        if gone:  # rows of an ancestor's group look that much less far ahead
            tokens, logp = (np.concatenate([part[gone:], np.zeros_like(part[:gone])]) for part in (tokens, logp))
            logp[len(logp) - gone :] = -np.inf
        return tokens[None], logp[None]


@dataclass(slots=True)
class Replayed:
    """What a replay predicts: counts of all texts together, and the seconds of answering them, prompts included."""

    stats: RequestStats = field(default_factory=RequestStats)
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.stats.emitted / self.seconds if self.seconds else 0.0


def replay(
    texts: Sequence[Text],
    drafter: Drafter | None,
    shape: Shape | None,
    timing: Timing,
    new: int,
    eos_token_ids: Sequence[int],
    *,
    clock: Clock = time.thread_time,
) -> Replayed:
    """Answer `texts` from their records.

    Args:
        texts: in the order of the run that is predicted.
        drafter: such as `Lookahead`, or `RecordedHeads`, or `Merge` of them; it learns. None for plain decoding.
        shape: sizes the trees; it learns. None for plain decoding.
        timing: what steps take.
        new: most tokens of an answer.
        eos_token_ids: the model's.
        clock: seconds, by which drafting is timed. By default those of this thread alone: what else the machine does
            meanwhile is not the drafter's.
    """
    found = Replayed()
    one = _Replay(drafter, timing, new, tuple(eos_token_ids), clock)
    if drafter is not None:
        drafter.bind(None, eos_token_ids=one.ends)  # type: ignore[arg-type]
    for text in texts:
        # An engine of its own answers each text. The shape starts from a curve of its own: what steps take must not
        # depend on what it thinks of them.
        sizer = None if drafter is None or shape is None else shape.bind(timing.cost.for_batch(), drafter)
        stats, seconds = one.answer(text, sizer)
        found.stats.add(stats)
        found.seconds += seconds
    return found


class _Replay:
    """A drafter that answers from records; arguments as of `replay`."""

    def __init__(self, drafter: Drafter | None, timing: Timing, new: int, ends: tuple[int, ...], clock: Clock) -> None:
        self._drafter, self._timing, self._new, self._clock = drafter, timing, new, clock
        self.ends = ends
        self._can = Capabilities() if drafter is None else drafter.capabilities
        parts = drafter.drafters if isinstance(drafter, Merge) else (drafter,)
        self._heads = [part for part in parts if isinstance(part, RecordedHeads)]
        self._own = sum(timing.own[head.name] for head in self._heads)

    def answer(self, text: Text, sizer: Sizer | None) -> tuple[RequestStats, float]:
        """Counts of one text, and the seconds that its answer is predicted to take."""
        ids = list(text.task.ids)
        request = RequestState(next(_ids), ids, len(ids), self._new, eos_token_ids=self.ends)
        stats, spent = RequestStats(), self._timing.prompt
        for head in self._heads:
            head.text = text
        if self._drafter is not None:
            self._drafter.begin(request)
        while stats.emitted < len(text.answer):
            seconds = self._step(request, text.answer[stats.emitted :], stats, sizer)
            if stats.steps > 1:  # the first step's are those of the prompt
                spent += seconds
        if sizer is not None:
            sizer.end(request)
        if self._drafter is not None:
            self._drafter.end(request)
        return stats, spent

    def _step(self, request: RequestState, left: list[int], stats: RequestStats, sizer: Sizer | None) -> float:
        """One step of an answer that goes on with the tokens `left`; the seconds that it is predicted to take."""
        began = self._clock()
        plan = self._draft(request, sizer)
        drafting = 0.0 if sizer is None else self._clock() - began
        trees = plan.trees
        assert trees is not None
        nodes = trees.walk(0, left)
        emitted = left[: len(nodes)]  # the accepted draft tokens, and one more
        path = nodes[: len(emitted)]
        reads = not stats.steps and request.prompt_length > 1  # the prompt is read
        request.tokens += emitted
        request.room -= len(emitted)
        stats.count([*nodes[1:], None][: len(emitted)], trees.sizes[0] - 1)
        learning = self._learn(plan, path, emitted)
        attached = self._can.prepares and plan.prepares_any
        rows = trees.sizes[0]
        passed = self._drafter.rows(rows, 1, plan.attach_to) if attached and self._drafter is not None else rows
        behind = float(self._timing.cost.of(passed)) + learning + (self._own if attached else 0.0)
        if sizer is not None:
            seconds = None if reads else drafting + behind
            sizer.observe(plan, Outcome([path], rows, seconds, drafting, attached))
        return drafting + behind

    def _draft(self, request: RequestState, sizer: Sizer | None) -> StepPlan:
        roots = TokenTree.roots(torch.tensor([request.tokens[-1]], dtype=torch.long, device="cpu"))
        if sizer is None or self._drafter is None:
            return StepPlan([request], [0], [False], roots)
        plan = sizer.plan([request], self._drafter.max_nodes)
        trees = self._drafter.draft([request], plan.budgets) if any(plan.budgets) else roots
        plan = sizer.trim(plan, trees)
        if self._can.attaches:
            self._drafter.plan(plan)
        return plan

    def _learn(self, plan: StepPlan, path: list[int], emitted: list[int]) -> float:
        """Let the drafter observe the step; the seconds that it takes."""
        if self._drafter is None or not self._can.observes:
            return 0.0
        assert plan.trees is not None
        began = self._clock()
        step = Step(plan.requests, plan.trees, NO_PASS, [0], 0, [path], [emitted], attach_to=plan.attach_to)
        self._drafter.observe(step)
        return self._clock() - began
