"""Recorded runs: what the model says to a prompt, what a drafter inside it would guess at every place, and the time.

Decoding is lossless, so what the model says does not depend on who drafts; and what heads, masks and pseudo states
guess at a place depends on the text up to there alone. So one plain run tells what any trie and any tree would have
had accepted; see `tune_replay`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from draftree.bench.measure import Task
from draftree.drafting import Drafter
from draftree.drafting.base import Context, Step
from draftree.drafting.in_model import InModelDrafter
from draftree.engine import Engine, Rules
from draftree.engine.limits import eos_token_ids
from draftree.host import open_host
from draftree.host.cost import StepCost, cached_cost
from draftree.host.likeliest import best_on_host
from draftree.tree import TokenTree
from draftree.tuning.onlooker import Onlooker
from draftree.tuning.shapes import OnlyRoots, Timed

Guesses = tuple[np.ndarray, np.ndarray]  # tokens and log-probabilities, each [D, K]
PROBES, PROBED = (0, 1, 2, 4, 8, 16, 32), 4  # guesses of the steps that are timed, and texts for each
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
        rows, seconds: a pass and reading its choices by its rows, as in decoding.
        aside: of a step without guesses, beside that.
        drafted: more than that of a step with guesses, the guessing left out.
        prompt: of reading a prompt, on average.
        own: by drafter inside the model, what it takes in a step beside rows.
    """

    rows: np.ndarray
    seconds: np.ndarray
    aside: float
    drafted: float
    prompt: float
    own: dict[str, float]

    def cost(self) -> StepCost:
        """A curve of its own, as curves change while they are used."""
        return StepCost(self.rows, self.seconds)


class Repeats(Drafter):
    """Guesses the newest token again and again: as many as it is asked for, for nothing."""

    name: ClassVar[str] = "repeats"

    def draft(self, requests: Sequence[Context], budgets: Sequence[int]) -> TokenTree:
        """See `Drafter.draft`."""
        guesses = [[[request.tokens[-1]] * n] if n else [] for request, n in zip(requests, budgets, strict=True)]
        return TokenTree.stack(
            [TokenTree.from_paths(request.tokens[-1], paths) for request, paths in zip(requests, guesses, strict=True)]
        )


class _Run(NamedTuple):
    """One answer: its tokens; steps behind the prompt's, their guessing and whole time; the prompt's time."""

    tokens: list[int]
    steps: int
    draft: float
    whole: float
    prompt: float


class Record:
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
        self._prompts = 0.0
        self._prepared = {name: OnlyRoots() for name in trained}

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
        return _Run(request.tokens, stats.steps - 1, stats.seconds["draft"] - first["draft"], whole, prompt)

    def _plain(self, ids: Sequence[int]) -> list[int]:
        run = self._run(ids)
        self._prompts += run.prompt
        return run.tokens

    def _look(self, name: str, drafter: InModelDrafter, ids: Sequence[int]) -> dict[int, Guesses]:
        seen: dict[int, Guesses] = {}

        def see(step: Step) -> None:
            logits = drafter.guesses(step, torch.zeros(1, dtype=torch.long, device=step.trees.device))
            if logits is not None:
                tokens, logp = best_on_host(logits, drafter.candidates)
                seen[len(step.requests[0].tokens)] = tokens[0], logp[0]

        self._run(ids, drafter=Onlooker(see, drafter), shape=self._prepared[name])
        return seen

    def pace(self) -> Pace:
        """What steps took; steps of several rows are timed here, on some of the texts.

        The host's own curve, of steps alone, is not what decoding takes: it only tells of more rows than are timed.
        """
        curve = cached_cost(self._host)
        shapes = {guesses: Timed(guesses) for guesses in PROBES}
        drafting = dict.fromkeys(PROBES, 0.0)
        for text in self.texts[:PROBED]:
            for guesses, shape in shapes.items():  # in turn, as a slow minute must not be taken for dear rows
                drafting[guesses] += self._run(text.task.ids, drafter=Repeats(), shape=shape).draft
        rows, seconds, asides = [], [], []
        for guesses, shape in shapes.items():
            steps = [step for step in shape.steps if step[0] == 1 + guesses]  # the last ones of a text have less room
            if steps:
                rows.append(1 + guesses)
                seconds.append(median(passed for _, passed, _ in steps))
                asides.append(median(whole - passed for _, passed, whole in steps) - drafting[guesses] / len(steps))
        if not rows:  # answers of a token or two
            rows, seconds, asides = [1], [float(curve.of(1))], [0.0]
        more = [n for n in curve.rows.tolist() if n > rows[-1]]
        scale = seconds[-1] / float(curve.of(rows[-1]))
        known = StepCost([*rows, *more], [*seconds, *(scale * float(curve.of(n)) for n in more)])
        own = {}
        for name, drafter in self.trained.items():
            step = median(self._prepared[name].steps or [0.0])
            own[name] = max(step - float(known.of(drafter.rows(1, 1, 1))) - asides[0], 0.0)
        count = max(len(self.texts) + len(self.lessons), 1)
        drafted = sum(asides[1:]) / max(len(asides) - 1, 1) - asides[0]
        return Pace(known.rows, known.seconds, max(asides[0], 0.0), max(drafted, 0.0), self._prompts / count, own)


def total_tokens(texts: Iterable[Text]) -> int:
    """New tokens of all answers."""
    return sum(len(text.answer) for text in texts)
