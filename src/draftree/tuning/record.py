"""Recorded runs: the model's answer, what a drafter inside it would draft at every place, and the time.

Decoding is lossless, so the model's answer does not depend on who drafts; and what heads, masks and pseudo states draft
at a place depends on the text up to there alone. So one plain run shows what any trie and any tree would have had
accepted; see `draftree.tuning.replay`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from draftree.bench.samples import Task
from draftree.drafting import Drafter
from draftree.drafting.base import RequestState, StepPlan
from draftree.drafting.in_model import InModelDrafter
from draftree.engine import Engine
from draftree.engine.request import Request, State
from draftree.runner import open_runner
from draftree.runner.step_cost import StepCost, cached_cost
from draftree.shaping import Fixed
from draftree.tree import TokenTree

Draft = tuple[np.ndarray, np.ndarray]  # tokens and log-probabilities, each [D, K]
PROBES = (0, 1, 2, 4, 8, 16, 32)  # draft tokens of the steps that are timed
CAPACITY = 512  # cache columns to begin with


@dataclass(slots=True)
class Text:
    """A prompt and the model's answer."""

    task: Task  # the prompt
    answer: list[int]  # new token ids
    # By drafter, what it would draft at each place: by number of tokens, prompt counted.
    drafts: dict[str, dict[int, Draft]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timing:
    """What steps take, in seconds."""

    cost: StepCost  # of a step by its rows, as in decoding, without what drafting takes
    prompt: float  # of reading a prompt, on average
    own: dict[str, float]  # by drafter inside the model, what it takes in a step besides its rows


class Repeats(Drafter):
    """Drafts the newest token again and again, as often as the budget says and without any work."""

    name = "repeats"

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        newest = [request.tokens[-1] for request in requests]
        chains = zip(newest, budgets, strict=True)
        return TokenTree.stack([TokenTree.from_paths(token, [[token] * n] if n else []) for token, n in chains])


class OnlyRoots(Fixed):
    """No draft tokens in any step, and the drafter prepares those of the next step all the same."""

    def __init__(self) -> None:
        super().__init__(0)

    def plan(self, requests: Sequence[RequestState], most: int, *, closed: bool = False) -> StepPlan:
        return StepPlan(requests, [0] * len(requests), [True] * len(requests))


class Record:
    """Runs a decoder-only model plainly, keeps its answers, and what the drafters `trained` would draft, by name."""

    def __init__(self, model: Any, max_new_tokens: int, trained: dict[str, InModelDrafter]) -> None:
        self.model, self.new, self.trained = model, max_new_tokens, trained
        self.texts: list[Text] = []
        self.lessons: list[Text] = []
        self._runner = open_runner(model)
        self._prompts: list[float] = []
        self._timed: dict[int, list[float]] = {1 + nodes: [] for nodes in PROBES}  # seconds of steps, by rows
        self._prepared: dict[str, list[float]] = {name: [] for name in trained}

    def lesson(self, task: Task) -> None:
        """Record a prompt that only teaches tries."""
        self.lessons.append(Text(task, self._plain(task.ids)))

    def text(self, task: Task) -> None:
        """Record a prompt that drafters are judged by."""
        text = Text(task, self._plain(task.ids))
        for name, drafter in self.trained.items():
            text.drafts[name] = self._look(name, drafter, task.ids)
        self.texts.append(text)

    def _run(
        self, ids: Sequence[int], note: Callable[[Request], None] = lambda request: None, **parts: Any
    ) -> tuple[list[int], dict[int, list[float]]]:
        """All tokens of an answer, and by tree rows the seconds of its steps, without what drafting took.

        The prompt's step is found under no rows. `note` is called behind each step.
        """
        capacity = max(CAPACITY, len(ids) + self.new + 64)
        engine = Engine(self.model, slots=1, runner=self._runner, capacity=capacity, **parts)
        request = engine.add(ids, max_new_tokens=self.new, do_sample=False)
        seconds: dict[int, list[float]] = defaultdict(list)
        while request.state is not State.FINISHED:
            drafted, drafting = request.stats.drafted, request.stats.seconds["draft"]
            begin = time.perf_counter()
            engine.step()
            spent = time.perf_counter() - begin - (request.stats.seconds["draft"] - drafting)
            seconds[1 + request.stats.drafted - drafted if request.stats.steps > 1 else 0].append(spent)
            note(request)
        if request.error is not None:
            raise request.error
        return request.tokens, seconds

    def _plain(self, ids: Sequence[int]) -> list[int]:
        tokens, seconds = self._run(ids)
        self._prompts.append(sum(seconds[0]))  # a long one is read in several steps
        return tokens

    def _look(self, name: str, drafter: InModelDrafter, ids: Sequence[int]) -> dict[int, Draft]:
        seen: dict[int, Draft] = {}

        def note(request: Request) -> None:
            held = drafter.ready(request.context)
            if held is not None:
                seen[held.length] = held.tokens, held.logp

        _, seconds = self._run(ids, note, drafter=drafter, shape=OnlyRoots())
        self._prepared[name] += seconds[1]
        return seen

    def probe(self, text: Text) -> None:
        """Time steps of several rows, by answering `text` with trees of each of the sizes `PROBES`."""
        # In turn, as a slow minute must not make the rows timed in it look expensive.
        for rows, taken in self._timed.items():
            _, seconds = self._run(text.task.ids, drafter=Repeats(), shape=Fixed(rows - 1))
            taken += seconds[rows]  # the last steps of a text have less room

    def timing(self) -> Timing:
        """What steps took, those of several rows on the texts that were probed.

        The runner's own curve, of passes alone, is not what decoding takes: it serves for more rows than are timed.
        """
        curve = cached_cost(self._runner)
        known = {rows: median(taken) for rows, taken in self._timed.items() if taken}
        known = known or {1: float(curve.of(1))}  # answers of a token or two
        last = max(known)
        scale = known[last] / float(curve.of(last))
        known |= {rows: scale * float(curve.of(rows)) for rows in curve.rows.tolist() if rows > last}
        cost = StepCost(list(known), list(known.values()))
        own = {}
        for name, drafter in self.trained.items():
            step = median(self._prepared[name] or [0.0])
            own[name] = max(step - float(cost.of(drafter.rows(1, 1, 1))), 0.0)
        return Timing(cost, sum(self._prompts) / max(len(self._prompts), 1), own)
