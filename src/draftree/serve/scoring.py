"""Score prompts for clients: one prompt at a time, chunk by chunk, in one cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from draftree.engine.passes import score_prompt
from draftree.engine.request import TokenScores
from draftree.runner import Runner
from draftree.serve.settings import LateError

Scores = list[list[TokenScores]]


@dataclass(slots=True, eq=False)
class Scoring:
    """Hold the prompts of one HTTP request and their scores; cancelling `found` ends the scoring."""

    prompts: Sequence[Sequence[int]]
    count: int  # Likeliest tokens to report for each position.
    deadline: float  # By `time.monotonic`.
    found: Future[Scores] = field(default_factory=Future)

    def fail(self, error: Exception) -> None:
        """End the scoring with an error, unless it was cancelled."""
        if self.found.set_running_or_notify_cancel():
            self.found.set_exception(error)


class Scorer:
    """Score prompts in order of arrival, in the worker's thread, by the `runner` of a decoder-only model."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._cache = runner.new_cache(1)
        self._queue: list[tuple[Scoring, Iterator[Scores]]] = []

    def __len__(self) -> int:
        """Return the number of prompts that wait or are being scored."""
        return sum(len(scoring.prompts) for scoring, _ in self._queue)

    def add(self, scoring: Scoring) -> None:
        """Queue the prompts of a request."""
        self._queue.append((scoring, self._chunks(scoring)))

    def turn(self) -> None:
        """Score one chunk of one prompt, so that decoding continues; end late and cancelled requests."""
        now = time.monotonic()
        for scoring, _ in self._queue:
            if now > scoring.deadline:
                scoring.fail(LateError())
        self._tidy()
        if not self._queue:
            return
        scoring, chunks = self._queue[0]
        try:
            scores = next(chunks)
        except Exception as error:
            scoring.fail(error)
        else:
            if len(scores) == len(scoring.prompts) and scoring.found.set_running_or_notify_cancel():
                scoring.found.set_result(scores)
        self._tidy()

    def end(self, error: Exception) -> None:
        """End all requests with an error."""
        for scoring, _ in self._queue:
            scoring.fail(error)
        self._tidy()

    def _chunks(self, scoring: Scoring) -> Iterator[Scores]:
        """Yield the scores of all finished prompts, after every chunk."""
        done: Scores = []
        for prompt in scoring.prompts:
            scores: list[TokenScores] = []
            for chunk in score_prompt(self._runner, prompt, scoring.count, self._cache):
                scores += chunk
                if len(scores) < len(prompt) - 1:
                    yield done
            done.append(scores)
            yield done

    def _tidy(self) -> None:
        self._queue = [(scoring, chunks) for scoring, chunks in self._queue if not scoring.found.done()]
