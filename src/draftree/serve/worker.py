"""Step the engine in one thread, deliver outputs to event loops, and score prompts chunk by chunk, one at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

import torch

from draftree.engine import Engine
from draftree.engine.passes import score_prompt
from draftree.engine.request import Request, State, TokenScores
from draftree.engine.sampling import SamplingParams
from draftree.serve.metrics import Metrics
from draftree.serve.output import Delta, OutputReader, OutputStream, hand_over
from draftree.serve.settings import ApiError, StoppingError

Scores = list[list[TokenScores]]


class Scoring:
    """Score the prompts of one HTTP request, chunk by chunk; cancelling `found` ends it.

    `chunks` yields the scores of the prompts' tokens in pieces; `deadline` is by `time.monotonic`.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], chunks: Iterator[list[TokenScores]], deadline: float) -> None:
        self.prompts, self.deadline = prompts, deadline
        self.found: Future[Scores] = Future()
        self._chunks, self._done = chunks, list[TokenScores]()

    def turn(self) -> None:
        """Score one chunk, so that decoding continues meanwhile."""
        try:
            self._done += next(self._chunks, ())
        except Exception as error:
            self.fail(error)
            return
        lengths = [len(prompt) - 1 for prompt in self.prompts]
        if len(self._done) == sum(lengths) and self.found.set_running_or_notify_cancel():
            scores = iter(self._done)
            self.found.set_result([list(islice(scores, length)) for length in lengths])

    def fail(self, error: Exception) -> None:
        """End it with an error, unless it has ended."""
        if not self.found.done() and self.found.set_running_or_notify_cancel():
            self.found.set_exception(error)


log = logging.getLogger("draftree.serve")
FAILURES = 3  # The worker is failing after this many failed steps in a row; a single one may be due to a request.
ACCELERATOR: Any = getattr(torch, "AcceleratorError", ())  # Only a new process recovers from this error.


class Worker:
    """Step an engine, which it closes, in a thread of its own; at most `queue` outputs wait for a slot."""

    def __init__(self, engine: Engine, tokenizer: Any, metrics: Metrics, queue: int = 256) -> None:
        self.engine, self.tokenizer, self.metrics = engine, tokenizer, metrics
        self._most = engine.config.slots + queue
        self._usual = 1.0  # Running mean of the seconds of an output in its slot.
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: list[OutputReader] = []
        self._scorings: list[Scoring] = []
        self._stopping = self._over = False  # It refuses new requests; an error has ended the thread.
        self._failures = 0  # Failed steps since the last successful one.
        self._thread = threading.Thread(target=self._run, name="draftree-engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Return the number of unfinished outputs and of prompts that wait for scores."""
        return len(self._live) + sum(len(scoring.prompts) for scoring in self._scorings)

    @property
    def alive(self) -> bool:
        """Return True while the thread takes requests."""
        return self._thread.is_alive() and not self._stopping

    @property
    def failing(self) -> bool:
        """Return True while steps fail; then queue a one-token request, whose success restores the worker."""
        failing = self._failures >= FAILURES
        if failing:
            self._tasks.put(self._try_token)
        return failing

    async def start(self, stream: OutputStream) -> None:
        """Queue outputs; return when the engine has taken them."""
        added: Future[None] = Future()
        try:
            self._put(partial(self._add, stream, added))
            await asyncio.wrap_future(added)
        except (asyncio.CancelledError, StoppingError):
            self.cancel(stream)
            raise

    async def score(self, prompts: Sequence[Sequence[int]], count: int, timeout: float) -> Scores:
        """Return the scores of each prompt's tokens after the first, with the `count` likeliest; see `score_prompt`."""
        runner, cache = self.engine.runner, self.engine.runner.new_cache(1)
        chunks = (part for one in prompts for part in score_prompt(runner, one, count, cache))
        scoring = Scoring(prompts, chunks, time.monotonic() + timeout)
        self._put(partial(self._add_scoring, scoring))
        return await asyncio.wrap_future(scoring.found)

    def cancel(self, stream: OutputStream) -> None:
        """End the outputs of `stream` that still wait or run."""
        stream.abandoned = True
        self._tasks.put(partial(self._end, stream))

    def close(self, grace: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `grace` seconds, end the rest, and wait for the thread."""
        self._stopping = True
        self._tasks.put(lambda: None)  # It wakes the thread.
        self._thread.join(grace)
        self._tasks.put(self._end_all)
        self._thread.join(60)
        if not self._thread.is_alive():
            self.engine.close()

    def _put(self, task: Callable[[], None]) -> None:
        if not self._stopping:
            self._tasks.put(task)
        if self._stopping:  # The thread may have ended before it saw the task.
            raise StoppingError

    # The methods below run in the worker's thread.

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:
            log.exception("the engine's thread ended by an error: restart the server")
            self._over = self._stopping = True
            self._fail_all()

    def _work(self) -> None:
        while True:
            self._take_tasks()
            if self.engine.busy:
                try:
                    self.engine.step()
                except Exception as error:
                    log.exception("a step failed")
                    self._failures += FAILURES if isinstance(error, ACCELERATOR) else 1
                else:
                    self._failures = 0
            if self._live:  # A failed move of slots can end all requests outside of a step.
                self._deliver()
            if self._scorings:
                self._score()
            if self._stopping and not self._at_work and self._tasks.empty():
                return

    @property
    def _at_work(self) -> bool:
        return self.engine.busy or bool(self._live) or bool(self._scorings)

    def _take_tasks(self) -> None:
        """Run the tasks of event loops; sleep while there is no work."""
        idle = not self._at_work and not self._stopping
        try:
            while True:
                self._tasks.get(block=idle)()
                idle = False
        except Empty:
            return

    def _add(self, stream: OutputStream, added: Future[None]) -> None:
        if not added.set_running_or_notify_cancel():
            return
        now = time.monotonic()
        try:
            self.check_queue(len(stream.outputs))
            for output in stream.outputs:
                output.added = now
                output.request = self.engine.add(output.prompt, output.params, inputs=output.images)
            live = [OutputReader(stream, i, self.tokenizer) for i in range(len(stream.outputs))]
        except Exception as error:
            self._drop(stream)
            added.set_exception(error)
            return
        self._live += live
        self.metrics.added(stream.outputs)
        added.set_result(None)

    def _add_scoring(self, scoring: Scoring) -> None:
        try:
            self.check_queue(len(scoring.prompts))
        except ApiError as error:
            scoring.fail(error)
        else:
            self._scorings.append(scoring)

    def _score(self) -> None:
        """Score a chunk of the first prompt; end late requests."""
        for scoring in self._scorings:
            if time.monotonic() > scoring.deadline:
                message = "Scoring the prompt timed out: raise draftree.timeout, or shorten it."
                scoring.fail(ApiError(message, code="timeout"))  # Clients would repeat it after the status 408.
        self._scorings = [scoring for scoring in self._scorings if not scoring.found.done()]
        if self._scorings:
            self._scorings[0].turn()

    def check_queue(self, more: int) -> None:
        """Raise an error unless the queue can take `more` outputs; safe in any thread."""
        if self._over:
            raise StoppingError
        waiting = self.live + more
        if waiting > self._most:
            # The openai client gives up at longer waits than two minutes.
            seconds = min(60, max(1, round(self._usual * waiting / self.engine.config.slots)))
            message = f"The server is busy: try again in {seconds} seconds."
            raise ApiError(message, status=429, code="queue_full", retry_after=seconds)

    def _try_token(self) -> None:
        if not self.engine.busy:
            with suppress(Exception):  # The engine refuses requests once its model has changed.
                self.engine.add([0], SamplingParams(1, ()))

    def _end(self, stream: OutputStream) -> None:
        self._drop(stream)
        self._deliver()

    def _end_all(self) -> None:
        """End all unfinished outputs because the server stops."""
        for live in self._live:
            live.request.error = StoppingError()
            self._leave(live.request)
        self._deliver()
        for scoring in self._scorings:
            scoring.fail(StoppingError())

    def _fail_all(self) -> None:
        """Fail all outputs without the engine or `_deliver`, because either may be the cause."""
        for live in self._live:
            delta = Delta(live.index, finish="error", error=StoppingError())
            _hand_over(live.stream.loop, [(live.stream, delta)])
        for scoring in self._scorings:
            scoring.fail(StoppingError())
        self._live, self._scorings = [], []
        with suppress(Empty):
            while True:
                self._tasks.get(block=False)()  # `check_queue` refuses each request.

    def _deliver(self) -> None:
        """Deliver the outputs of the last step, in one call into each event loop."""
        now = time.monotonic()
        news: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Delta]]] = {}
        left = []
        for live in self._live:
            output, given, before = live.output, live.output.given, live.output.last
            delta = self._news_of(live, now)
            if output.given > given:
                self.metrics.emitted(output, output.given - given, before if given else None)
            if delta is not None:
                news.setdefault(live.stream.loop, []).append((live.stream, delta))
            if delta is None or delta.finish is None:
                left.append(live)
            else:
                if output.joined is not None:
                    self._usual += 0.1 * (now - output.joined - self._usual)
                self.metrics.ended(output)
        self._live = left
        for loop, deltas in news.items():
            _hand_over(loop, deltas)

    def _news_of(self, live: OutputReader, now: float) -> Delta | None:
        """Return the new tokens and text of an output; end it at its deadline or at the end of its text."""
        request, stream = live.request, live.stream
        if now > stream.deadline:
            if stream.begun is None:
                requests = [output.request for output in stream.outputs if output.request is not None]
                stream.begun = any(one.state is not State.WAITING for one in requests)
            if not stream.begun:
                message = "The request timed out in the queue: send it again later."
                request.error = ApiError(message, status=503, retry_after=1)
            self._leave(request)
        try:
            delta = live.news(now)
        except Exception as raised:  # The tokenizer failed.
            request.error, live.output.finish = raised, "error"
            delta = Delta(live.index, finish="error")
        if delta is not None and delta.finish is not None:
            self._leave(request)  # The engine does not know stop strings.
        if delta is not None and delta.finish == "error":
            delta.error = request.error
        return delta

    def _drop(self, stream: OutputStream) -> None:
        for output in stream.outputs:
            if output.request is not None:
                self._leave(output.request)

    def _leave(self, request: Request) -> None:
        """End a request; the engine fails the other running ones if it cannot move them up."""
        try:
            self.engine.cancel(request)
        except Exception:
            log.exception("a request could not leave its slot: all running requests failed")


def _hand_over(loop: asyncio.AbstractEventLoop, deltas: list[tuple[OutputStream, Delta]]) -> None:
    with suppress(RuntimeError):  # The event loop is closed.
        loop.call_soon_threadsafe(hand_over, deltas)
