"""Recorded runs: what the model says to a prompt, what a drafter inside it would guess at every place, and the time.

Decoding is lossless, so what the model says does not depend on who drafts; and what heads, masks and pseudo states
guess at a place depends on the text up to there alone. So one plain run tells what any trie and any tree would have
had accepted; see `tune_replay`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from draftree.bench.analysis_guesses import Onlooker, OnlyRoots
from draftree.bench.harness import Task
from draftree.drafting import Lookahead
from draftree.drafting.base import Step
from draftree.drafting.in_model import InModelDrafter, best_on_host
from draftree.engine import Engine, Rules
from draftree.engine.limits import eos_token_ids
from draftree.host import open_host
from draftree.host.cost import StepCost, cached_cost
from draftree.shaping import Fixed

Guesses = tuple[np.ndarray, np.ndarray]  # tokens and log-probabilities, each [D, K]
PROBE, PROBED = 4, 8  # guesses of a step, and texts, by which steps with guesses are timed
CAPACITY = 512  # cache columns to begin with


@dataclass(slots=True)
class Text:
    """A prompt and what the model says to it.

    Attributes:
        task: the prompt.
        answer: new token ids.
        guesses: by drafter, what it would guess at each place: by number of tokens, prompt counted.
    """

    task: Task
    answer: list[int]
    guesses: dict[str, dict[int, Guesses]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps take, in seconds.

    Attributes:
        rows, seconds: a pass by its rows, as the host's curve says.
        factor: a real pass over what the curve says.
        aside: of a plain step beside its pass.
        drafted: more than that and the pass by the curve, of a step with guesses, the guessing left out.
        prompt: of reading a prompt, on average.
        own: by drafter inside the model, what it takes in a step beside rows.
    """

    rows: np.ndarray
    seconds: np.ndarray
    factor: float
    aside: float
    drafted: float
    prompt: float
    own: dict[str, float]

    def cost(self) -> StepCost:
        """A curve of its own, as curves change while they are used."""
        return StepCost(self.rows, self.factor * self.seconds)


class _Run(NamedTuple):
    """One answer: its tokens; steps behind the prompt's, their passes, guessing and whole time; the prompt's time."""

    tokens: list[int]
    steps: int
    verify: float
    draft: float
    whole: float
    prompt: float


class Recorder:
    """Runs the model plainly, and keeps what it says.

    Args:
        model: a decoder-only model.
        max_new_tokens: most tokens of an answer.
        trained: drafters inside the model to look at, by name.
    """

    def __init__(self, model: Any, max_new_tokens: int, trained: dict[str, InModelDrafter]) -> None:
        self.model, self.new, self.trained = model, max_new_tokens, trained
        self.texts: list[Text] = []
        self.lessons: list[Text] = []
        self._host = open_host(model)
        self._steps = self._verify = self._whole = self._prompts = 0.0
        self._own_steps = dict.fromkeys(trained, 0)
        self._own_seconds = dict.fromkeys(trained, 0.0)

    def lesson(self, task: Task) -> None:
        """Record a prompt that only teaches tries."""
        self.lessons.append(Text(task, self._plain(task.ids)))

    def text(self, task: Task) -> None:
        """Record a prompt that drafters are judged by."""
        text = Text(task, self._plain(task.ids))
        for name, drafter in self.trained.items():
            text.guesses[name] = self._look(name, drafter, task.ids)
        self.texts.append(text)

    def _run(self, ids: Sequence[int], **parts: Any) -> _Run:
        engine = Engine(self.model, slots=1, host=self._host, capacity=max(CAPACITY, len(ids) + self.new + 64), **parts)
        request = engine.add(ids, Rules(self.new, eos_token_ids(self.model)))
        stats = request.stats
        begin = time.perf_counter()
        engine.step()
        prompt = time.perf_counter() - begin
        first = stats.seconds.copy()
        begin = time.perf_counter()
        engine.run()
        whole = time.perf_counter() - begin
        if request.error is not None:
            raise request.error
        draft, verify = (stats.seconds[stage] - first[stage] for stage in ("draft", "verify"))
        return _Run(request.tokens, stats.steps - 1, verify, draft, whole, prompt)

    def _plain(self, ids: Sequence[int]) -> list[int]:
        run = self._run(ids)
        self._steps += run.steps
        self._verify += run.verify
        self._whole += run.whole
        self._prompts += run.prompt
        return run.tokens

    def _look(self, name: str, drafter: InModelDrafter, ids: Sequence[int]) -> dict[int, Guesses]:
        seen: dict[int, Guesses] = {}

        def see(step: Step) -> None:
            logits = drafter.guesses(step, torch.zeros(1, dtype=torch.long, device=step.trees.device))
            if logits is not None:
                tokens, logp = best_on_host(logits, drafter.candidates)
                seen[len(step.requests[0].tokens)] = tokens[0], logp[0]

        run = self._run(ids, drafter=Onlooker(see, drafter), shape=OnlyRoots())
        self._own_steps[name] += run.steps
        self._own_seconds[name] += run.whole
        return seen

    def pace(self) -> Pace:
        """What steps took, over all that was recorded; steps with guesses are timed here, on some of the texts."""
        curve = cached_cost(self._host)
        steps = max(self._steps, 1)
        one = float(curve.of(1))
        factor = self._verify / steps / one if self._steps else 1.0
        aside = (self._whole - self._verify) / steps
        probe = Lookahead()
        runs = [self._run(text.task.ids, drafter=probe, shape=Fixed(PROBE)) for text in self.texts[:PROBED]]
        drafted = sum(run.whole - run.draft for run in runs) / max(sum(run.steps for run in runs), 1)
        drafted -= factor * float(curve.of(1 + PROBE)) + aside
        own = {}
        for name, drafter in self.trained.items():
            step = self._own_seconds[name] / max(self._own_steps[name], 1)
            rows = factor * float(curve.of(drafter.rows(1, 1, 1)))
            own[name] = max(step - rows - aside, 0.0)
        count = max(len(self.texts) + len(self.lessons), 1)
        prompt = self._prompts / count
        return Pace(curve.rows.copy(), curve.seconds.copy(), factor, aside, max(drafted, 0.0), prompt, own)


def total_tokens(texts: Iterable[Text]) -> int:
    """New tokens of all answers."""
    return sum(len(text.answer) for text in texts)
