"""One thread that steps the engine: it takes requests from event loops and gives tokens back as text."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from draftree.detokenizer import Detokenizer
from draftree.engine import Engine
from draftree.engine.request import State
from draftree.serve.parts import Delta, Part
from draftree.serve.scoring import Scorer, Scores, Scoring, fail
from draftree.serve.text import StopStrings

log = logging.getLogger("draftree.serve")


class Answers:
    """The answers of one HTTP request, as they come; belongs to the event loop that made it.

    A reader that is slow finds later deltas joined to one, so that no more than the answers themselves is kept.
    With `whole`, each answer comes as one delta at its end, and the event loop is not woken by every step.
    """

    def __init__(self, worker: Worker, parts: list[Part], timeout: float, *, whole: bool) -> None:
        self.parts, self.whole = parts, whole
        self.deadline = time.monotonic() + timeout
        self.abandoned = False  # nobody reads them any more
        self.begun: bool | None = None  # once their time was over, whether any of them had been begun by then
        self._worker = worker
        self.loop = asyncio.get_running_loop()
        self._ready: dict[int, Delta] = {}
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    async def deltas(self, pause: float | None = None) -> AsyncIterator[Delta | None]:
        """Deltas until all answers have finished; leaving the loop earlier ends them.

        Args:
            pause: seconds of silence after which None comes, again and again; None for no such sign.

        Raises:
            Exception: whatever ended one of the answers with an error.
        """
        left = len(self.parts)
        try:
            while left:
                try:
                    async with asyncio.timeout(pause):
                        await self._news.wait()
                except TimeoutError:
                    yield None
                    continue
                self._news.clear()
                if self._error is not None:
                    raise self._error
                ready, self._ready = self._ready, {}
                for delta in ready.values():
                    left -= delta.finish is not None
                    yield delta
        finally:
            if left:
                self.cancel()

    def cancel(self) -> None:
        """End what still runs; its slots are free after the step under way."""
        self._worker.cancel(self)

    def deliver(self, delta: Delta) -> None:
        """Called in the event loop with what a step brought."""
        known = self._ready.get(delta.index)
        if known is None:
            self._ready[delta.index] = delta
        else:
            known.add(delta)
        self._error = self._error or delta.error
        self._news.set()


class _Live:
    """A part at work in the worker's thread: its text so far."""

    def __init__(self, answers: Answers, index: int, tokenizer: Any) -> None:
        self.answers, self.index = answers, index
        self.part = answers.parts[index]
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=self.part.skip_special_tokens)
        self.stops = StopStrings(self.part.stops, include=self.part.include_stop)
        self.held: Delta | None = None  # of an answer that is wanted whole
        self.tokens = 0  # of the answer, those begun elsewhere included
        resumed = self.part.rules.resumed
        for token in self.part.prompt[len(self.part.prompt) - resumed :]:  # their text has been given already
            self.read(token)

    def read(self, token: int) -> tuple[str, str]:
        """The answer's next token: what it adds to the text, and what of the text can be given now."""
        self.tokens += 1
        piece = self.detokenizer.feed(token)
        return piece, self.stops.feed(piece, may_end=self.tokens > self.part.min_tokens)

    def news(self, now: float) -> Delta | None:
        """What has come since the last call; None where nothing has."""
        part = self.part
        request = part.request
        assert request is not None
        if part.joined is None and request.state is not State.WAITING and not isinstance(request.error, QueuedError):
            part.joined = now
        over = request.state is State.FINISHED
        if len(request.output) == part.given and not over:
            return None
        delta, texts = Delta(self.index), []
        for emitted in request.output[part.given :]:
            delta.emitted.append(emitted)
            piece, text = self.read(emitted.token)
            texts.append(text)
            if part.rules.keep_trees or part.rules.logprobs is not None:
                delta.pieces.append(piece)
            if self.stops.found is not None:
                break
        part.given += len(delta.emitted)
        delta.trees, request.trees = request.trees, []
        if delta.emitted:
            part.first = now if part.first is None else part.first
            part.last = now
        if self.stops.found is not None:
            delta.finish = "stop"
        elif over:
            last = self.stops.feed(self.detokenizer.rest(), may_end=self.tokens > part.min_tokens)
            texts += [last, self.stops.rest()]
            cancelled = "cancelled" if self.answers.abandoned else "length"
            ends = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": cancelled}
            own = isinstance(request.error, StoppingError | QueuedError)
            ended = "error" if own else str(request.finish_reason)
            delta.finish = "stop" if self.stops.found is not None else ends.get(ended, "error")
        delta.text = "".join(texts)
        part.finish = delta.finish
        if not self.answers.whole:
            return delta
        if self.held is None:
            self.held = delta
        else:
            self.held.add(delta)
        return None if delta.finish is None else self.held


class QueuedError(TimeoutError):
    """The time of a request was over before it was begun."""

    def __init__(self) -> None:
        super().__init__("The server was busy until the time of this request was over: send it again, or later.")


class StoppingError(RuntimeError):
    """The server is shutting down: nothing new is taken, and what has not ended in time is broken off."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down: send the request to another, or later.")


class FullError(Exception):
    """The queue is full; `retry_after` is in how many seconds it may not be."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The server is busy: try again in {retry_after} seconds.")
        self.retry_after = retry_after


class Worker:
    """Steps an engine in a thread of its own, while there is work.

    Args:
        engine: belongs to the worker from now on.
        tokenizer: the model's.
        queue: answers that may wait for a slot.

    Attributes:
        on_add, on_end: called in the worker's thread, with the parts that are queued, and with each that is over.
    """

    def __init__(self, engine: Engine, tokenizer: Any, queue: int = 256) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._most = engine.config.slots + queue
        self._usual = 1.0  # seconds that an answer takes, a running mean
        self.on_add: list[Callable[[Sequence[Part]], None]] = []
        self.on_end: list[Callable[[Part], None]] = []
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: list[_Live] = []
        self._scorer = Scorer(engine.runner)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="draftree-engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Answers that wait or run, and prompts that wait for their scores."""
        return len(self._live) + len(self._scorer)

    @property
    def alive(self) -> bool:
        """Whether the thread is at work."""
        return self._thread.is_alive() and not self._stopping

    # ---------------------------------------------------------------- called from event loops

    async def start(self, parts: list[Part], timeout: float, *, whole: bool = False) -> Answers:
        """Queue answers; returns once the engine has taken them.

        Args:
            parts: the answers.
            timeout: seconds after which they end as they are.
            whole: nobody reads them before they are over.

        Raises:
            ValueError: a prompt that cannot be answered.
            FullError: too many answers wait already.
            StoppingError: the server is shutting down.
        """
        answers = Answers(self, parts, timeout, whole=whole)
        added: Future[None] = Future()
        self._put(partial(self._add, answers, added))
        try:
            await asyncio.wrap_future(added)
        except asyncio.CancelledError:  # whoever asked is gone
            self.cancel(answers)
            raise
        finally:
            del added  # the error's frames hold this one
        return answers

    async def score(self, prompts: Sequence[Sequence[int]], count: int, timeout: float) -> Scores:
        """Scores of each prompt's tokens behind the first, see `score_prompt`. A caller that is cancelled ends it.

        Args:
            prompts: token ids.
            count: how many of the likeliest tokens to tell with each.
            timeout: seconds after which it fails.

        Raises:
            FullError: too many prompts and answers wait already.
            StoppingError: the server is shutting down.
            TimeoutError: it took too long.
        """
        scoring = Scoring(prompts, count, time.monotonic() + timeout)
        self._put(lambda: self._add_scoring(scoring))
        return await asyncio.wrap_future(scoring.found)

    def cancel(self, answers: Answers) -> None:
        """End the parts of `answers` that still wait or run."""
        answers.abandoned = True
        self._tasks.put(lambda: self._end(answers))

    def close(self, grace: float = 0.0) -> None:
        """Take nothing new, let what runs go on for `grace` seconds, end the rest, and wait for the thread."""
        self._stopping = True
        self._tasks.put(lambda: None)
        self._thread.join(grace)
        self._tasks.put(self._end_all)
        self._thread.join(60)
        if not self._thread.is_alive():
            self.engine.close()

    def _put(self, task: Callable[[], None]) -> None:
        if self._stopping:
            raise StoppingError
        self._tasks.put(task)

    # ---------------------------------------------------------------- the worker's own thread

    def _run(self) -> None:
        while True:
            self._take_tasks()
            if self.engine.busy:
                try:
                    self.engine.step()
                except Exception:
                    log.exception("a step failed")
                self._deliver()
            if self._scorer:
                self._scorer.turn()
            if self._stopping and not self.engine.busy and not self._scorer and self._tasks.empty():
                return

    def _take_tasks(self) -> None:
        """Do what event loops ask for; sleeps while there is nothing at all to do."""
        idle = not self.engine.busy and not self._scorer and not self._stopping
        try:
            while True:
                self._tasks.get(block=idle)()
                idle = False
        except Empty:
            return

    def _add(self, answers: Answers, added: Future[None]) -> None:
        if not added.set_running_or_notify_cancel():
            return
        now = time.monotonic()
        try:
            self.make_sure_of_room(len(answers.parts))
            for part in answers.parts:
                part.added = now
                part.request = self.engine.add(part.prompt, part.rules)
            live = [_Live(answers, i, self.tokenizer) for i in range(len(answers.parts))]
        except Exception as error:
            self._drop(answers)
            added.set_exception(error)
            del added  # the error's frames hold this one
            return
        self._live += live
        for listener in self.on_add:
            listener(answers.parts)
        added.set_result(None)

    def _add_scoring(self, scoring: Scoring) -> None:
        try:
            self.make_sure_of_room(len(scoring.prompts))
        except FullError as error:
            fail(scoring, error)
        else:
            self._scorer.add(scoring)

    def make_sure_of_room(self, more: int) -> None:
        """Raise a FullError where so many answers more have no place; any thread may ask."""
        waiting = self.live + more
        if waiting > self._most:
            raise FullError(max(1, round(self._usual * waiting / self.engine.config.slots)))

    def _end(self, answers: Answers) -> None:
        self._drop(answers)
        self._deliver()

    def _end_all(self) -> None:
        """Break off what has not ended, as the server stops."""
        for live in self._live:
            assert live.part.request is not None
            live.part.request.error = StoppingError()
            self._drop(live.answers)
        self._deliver()
        self._scorer.end(StoppingError())

    def _deliver(self) -> None:
        """Hand out what the last step brought, in one call into each event loop."""
        now = time.monotonic()
        news: dict[asyncio.AbstractEventLoop, list[tuple[Answers, Delta]]] = {}
        left = []
        for live in self._live:
            delta = self._news_of(live, now)
            if delta is not None:
                news.setdefault(live.answers.loop, []).append((live.answers, delta))
            if delta is None or delta.finish is None:
                left.append(live)
            else:
                self._usual += 0.1 * (now - live.part.added - self._usual)
                for listener in self.on_end:
                    listener(live.part)
        self._live = left
        for loop, deltas in news.items():
            try:
                loop.call_soon_threadsafe(_hand_over, deltas)
            except RuntimeError:  # the event loop is closed: nobody reads these any more
                for answers, _ in deltas:
                    self.cancel(answers)

    def _news_of(self, live: _Live, now: float) -> Delta | None:
        """What has come of one answer; ends it where its time or its text is over."""
        request = live.part.request
        assert request is not None
        if now > live.answers.deadline:
            if live.answers.begun is None:
                requests = [part.request for part in live.answers.parts if part.request is not None]
                live.answers.begun = any(one.state is not State.WAITING for one in requests)
            if not live.answers.begun:
                request.error = QueuedError()
            self.engine.cancel(request)
        try:
            delta = live.news(now)
        except Exception as raised:  # a tokenizer's
            request.error, live.part.finish = raised, "error"
            delta = Delta(live.index, finish="error")
        if delta is not None and delta.finish is not None:
            self.engine.cancel(request)  # a stop string comes before the engine's own end
        if delta is not None and delta.finish == "error":
            delta.error = request.error
        return delta

    def _drop(self, answers: Answers) -> None:
        for part in answers.parts:
            if part.request is not None:
                self.engine.cancel(part.request)


def _hand_over(news: list[tuple[Answers, Delta]]) -> None:
    for answers, delta in news:
        answers.deliver(delta)
