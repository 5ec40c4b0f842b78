"""What the routes of a server share: how a request is let in, answered and refused."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.sse import EventSourceResponse

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.engine import Engine
from draftree.engine.request import TokenScores
from draftree.errors import ModelChangedError
from draftree.grammar import GrammarBusyError
from draftree.serve.answers import (
    Call,
    api_error,
    best,
    encoded,
    statistics,
    stream,
    usage,
    whole_choice,
)
from draftree.serve.bodies import Body, read_body, while_there, whole_body
from draftree.serve.calls import CallReader
from draftree.serve.delivery import Answers
from draftree.serve.errors import ApiError, FullError
from draftree.serve.grammars import may_compile
from draftree.serve.metrics import Metrics
from draftree.serve.parts import Delta, Part
from draftree.serve.schema import Sampling
from draftree.serve.settings import ServerSettings
from draftree.serve.worker import Worker

Read = TypeVar("Read")
NOT_HELD_BACK = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # by what is in between, such as nginx
MOST_SCORES = 1_000_000  # log-probabilities of prompts in one response, which take some 300 bytes each
LONG = 256 << 10  # bytes of a body, above which its texts are tokenised apart from those of others, one at a time
MOST_LONG = 8  # such bodies that may wait
GRAMMARS = 2  # requests whose grammars are compiled at once, so that cores are left for the engine


def give_memory_back() -> None:
    """Return freed memory to the system: after a text of megabytes glibc keeps hundreds of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class Server:
    """What the routes share: the worker, the reader of calls, metrics, and how a request is let in.

    Args:
        engine: belongs to the server from now on.
        tokenizer: the model's.
        settings: names and limits.

    Raises:
        ValueError: an encoder-decoder.
    """

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings) -> None:
        if engine.target.encoder_decoder:
            raise ValueError("The server answers for decoder-only models: use draftree.generate for encoder-decoders.")
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.metrics = Metrics(engine)
        self.worker = Worker(engine, tokenizer, settings.queue)
        self.worker.on_add.append(self.metrics.added)
        self.worker.on_tokens.append(self.metrics.came)
        self.worker.on_end.append(self.metrics.ended)
        self.calls = CallReader(engine, tokenizer, settings)
        self._tries = parts_of(engine.config.drafter, Lookahead)
        # asyncio's own threads are for all that takes long, and a grammar may hold one for seconds.
        self._grammars = ThreadPoolExecutor(GRAMMARS, "draftree-grammars")
        self._long = ThreadPoolExecutor(1, "draftree-long-texts")
        self._waiting_long = 0
        self.started = int(time.time())

    async def body(self, request: Request, kind: type[Body]) -> Body:
        """Return a request's body as `kind`.

        Raises:
            ApiError: too long, too slow, not of this kind, or the client has gone away meanwhile.
        """
        text = await whole_body(request, self.settings)
        request.state.long = len(text) > LONG
        return read_body(text, kind)

    async def read(
        self, request: Request, reader: Callable[[Any, str | None], Read], body: Sampling, key: str | None
    ) -> Read:
        """Return what a method of `calls` makes of a body, in a thread.

        Args:
            request: whose body it is.
            reader: the method.
            body: the request's.
            key: under which it came.

        Raises:
            ApiError: what cannot be done.
        """
        work = partial(reader, body, self.settings.cache_salt(key, body.user))
        return await self.in_thread(request, work, self._grammars if may_compile(body) else None)

    async def in_thread(self, request: Request, work: Callable[[], Read], pool: Executor | None = None) -> Read:
        """Return what `work` returns, done in a thread of `pool`, or of asyncio's own.

        Work on long bodies has a single thread, so that those of others find one: a text of megabytes takes seconds.

        Raises:
            ApiError: what `work` raises, or status 429 where too many long bodies wait already.
        """
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        if not request.state.long:
            return await loop.run_in_executor(pool, context.run, work)
        if self._waiting_long >= MOST_LONG:
            raise FullError(10)
        self._waiting_long += 1
        try:
            return await loop.run_in_executor(self._long, context.run, work)
        finally:
            self._waiting_long -= 1
            loop.run_in_executor(self._long, give_memory_back)

    def key(self, request: Request) -> str | None:
        """The name of the key that a request presents; None where the server has none.

        Raises:
            ApiError: no key, or an unknown one.
        """
        if not self.settings.api_keys:
            return None
        found = self.settings.key_of(request.headers.get("authorization"))
        if found is None:
            raise ApiError(
                "The API key is missing or unknown: send 'Authorization: Bearer KEY'.",
                status=401,
                code="invalid_api_key",
            )
        return found

    async def start(self, answers: Answers) -> None:
        """Have the worker answer.

        Raises:
            ApiError: the queue is full, the server is stopping, or the engine refuses a prompt.
        """
        cache_salt = answers.parts[0].params.cache_salt
        try:
            self.worker.make_sure_of_room(len(answers.parts))
            for drafter in self._tries:
                if not drafter.has_trie(cache_salt):  # which is made outside of the engine's thread
                    await asyncio.to_thread(drafter.trie_of, cache_salt)
            await self.worker.start(answers)
        except (GrammarBusyError, ModelChangedError) as error:
            raise api_error(error) from None
        except ValueError as error:
            raise ApiError(str(error)) from None

    async def score(
        self, parts: list[Part], count: int, tries: int, told: int, timeout: float
    ) -> list[list[TokenScores]]:
        """Have the worker score the prompt of each part.

        Args:
            parts: `tries` for each prompt.
            count: how many of the likeliest tokens to tell with each token.
            tries: how often each prompt stands among the parts; it is scored once.
            told: how often the response has the scores of each.
            timeout: seconds after which the request is refused.

        Raises:
            ApiError: the queue is full, the server is stopping, or the time is over; more scores than memory is for.
        """
        wanted = sum(len(part.prompt) for part in parts[::tries]) * (1 + count) * told
        if wanted > MOST_SCORES:
            raise ApiError(
                f"The prompts have {wanted} log-probabilities, and at most {MOST_SCORES} are told at once: "
                "send fewer prompts, or ask for fewer logprobs or a smaller n.",
                "logprobs",
            )
        found = await self.worker.score([part.prompt for part in parts[::tries]], count, timeout)
        return [scores for scores in found for _ in range(tries)]

    async def answer(self, request: Request, call: Call, parts: list[Part]) -> Response:
        """The response to a call, streamed or whole."""
        body, n, tries = call.body, call.body.n or 1, call.body.tries
        prompts = sum(len(part.prompt) for part in parts) // tries
        deadline = time.monotonic() + min(self.settings.timeout, body.own.timeout or math.inf)
        if call.echo and call.logprobs is not None:
            scoring = self.score(parts, call.logprobs, tries, n, deadline - time.monotonic())
            call.scores = await while_there(request, scoring)
        answers = Answers(parts, deadline - time.monotonic(), self.worker.cancel, whole=not body.stream)
        if body.max_tokens != 0:
            await self.start(answers)
        else:  # the prompts alone are wanted
            for index in range(len(parts)):
                answers.deliver(Delta(index, finish="length"))
        if body.stream:
            return EventSourceResponse(stream(call, answers, prompts), headers=NOT_HELD_BACK)
        whole = await self._whole(request, answers)
        kept = whole
        if tries > n:
            kept = [delta for i in range(0, len(whole), tries) for delta in best(whole[i : i + tries], n)]

        def chosen() -> list[dict[str, Any]]:
            return [whole_choice(call, delta, number, parts[delta.index]) for number, delta in enumerate(kept)]

        # Texts of single tokens take long, and nobody else must wait for them.
        slow = call.logprobs is not None or body.own.trees
        choices = await asyncio.to_thread(chosen) if slow else chosen()
        found = call.envelope(chunk=False) | {"choices": choices, "usage": usage(parts, prompts, call.prediction)}
        if body.own.stats:
            found["draftree"] = statistics(parts)
        return Response(encoded(found), media_type="application/json")

    async def _whole(self, request: Request, answers: Answers) -> list[Delta]:
        """All of the answers, in their order; a client that goes away ends them."""

        async def collected() -> list[Delta]:
            whole = [delta async for delta in answers.deltas() if delta is not None]
            return sorted(whole, key=lambda delta: delta.index)

        try:
            return await while_there(request, collected())
        except BaseException as error:
            answers.cancel()
            if not isinstance(error, Exception):
                raise
            raise api_error(error) from None
