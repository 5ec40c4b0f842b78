"""What the routes of a server share: how a request is let in, answered and refused."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse
from starlette.requests import ClientDisconnect

from draftree.engine import Engine
from draftree.serve.answers import Call, NoAnswers, best, collect, statistics, stream, told, usage, whole_choice
from draftree.serve.bodies import Body, read_body
from draftree.serve.calls import CallReader
from draftree.serve.errors import ApiError
from draftree.serve.metrics import Metrics
from draftree.serve.parts import Delta, Part
from draftree.serve.schema import Chat, Completion
from draftree.serve.settings import ServerSettings
from draftree.serve.worker import Answers, FullError, Worker

GONE = "The client has gone away."


class Server:
    """What the routes share: the worker, the reader of calls, metrics, and how a request is let in.

    Args:
        engine: belongs to the server from now on.
        tokenizer: the model's.
        settings: names and limits.
    """

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.metrics = Metrics(engine)
        self.worker = Worker(engine, tokenizer, settings.queue)
        self.worker.on_end.append(self.metrics.ended)
        self.calls = CallReader(engine, tokenizer, settings)
        self.started = int(time.time())

    async def body(self, request: Request, kind: type[Body]) -> Body:
        """A request's body as `kind`.

        Raises:
            ApiError: too long, not of this kind, or the client has gone away meanwhile.
        """
        parts, size = [], 0
        try:
            async for piece in request.stream():
                size += len(piece)
                if size > self.settings.body_bytes:
                    raise ApiError(f"The body is longer than {self.settings.body_bytes} bytes: shorten it.", status=413)
                parts.append(piece)
        except ClientDisconnect:
            raise ApiError(GONE, status=499) from None
        return read_body(b"".join(parts), kind)

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

    async def start(self, parts: list[Part], body: Completion | Chat) -> Answers:
        """Have the worker answer.

        Args:
            parts: the answers.
            body: the request that they answer.

        Raises:
            ApiError: the queue is full, or the engine refuses a prompt.
            StoppingError: the server is shutting down.
        """
        timeout = min(self.settings.timeout, body.own.timeout or math.inf)
        try:
            return await self.worker.start(parts, timeout, whole=not body.stream)
        except FullError as error:
            raise ApiError(str(error), status=429, code="queue_full", retry_after=error.retry_after) from None
        except ValueError as error:
            raise ApiError(str(error)) from None

    async def answer(self, request: Request, call: Call, parts: list[Part]) -> Response:
        """The response to a call, streamed or whole."""
        body, n, tries = call.body, call.body.n or 1, call.body.tries
        prompts = sum(len(part.prompt) for part in parts) // tries
        if call.echo and call.logprobs is not None:
            call.scores = [await self.worker.score(part.prompt, call.logprobs) for part in parts]
        answers = NoAnswers(parts) if body.max_tokens == 0 else await self.start(parts, body)
        if body.stream:
            return EventSourceResponse(stream(call, answers, prompts), headers={"Cache-Control": "no-cache"})
        whole = await self._whole(request, answers)
        kept = whole
        if tries > n:
            kept = [delta for i in range(0, len(whole), tries) for delta in best(whole[i : i + tries], n)]
        choices = [whole_choice(call, delta, number, parts[delta.index]) for number, delta in enumerate(kept)]
        found = call.envelope(chunk=False) | {"choices": choices, "usage": usage(parts, prompts, call.prediction)}
        if body.own.stats:
            found["draftree"] = statistics(parts)
        return JSONResponse(found)

    async def _whole(self, request: Request, answers: Answers | NoAnswers) -> list[Delta]:
        """All of the answers; a client that goes away ends them."""
        done, gone = asyncio.ensure_future(collect(answers)), asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ApiError(GONE, status=499)
            error = done.exception()
            if error is not None:
                raise told(error)
            return done.result()
        finally:
            gone.cancel()
            if not done.done():
                done.cancel()
                answers.cancel()


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
