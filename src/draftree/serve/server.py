"""Read bodies, check keys, and answer or refuse requests, for all routes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.requests import ClientDisconnect

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.engine import Engine
from draftree.engine.request import TokenScores
from draftree.errors import ModelChangedError
from draftree.grammar import GrammarBusyError
from draftree.serve.calls import CallReader
from draftree.serve.http import ApiError, GoneError
from draftree.serve.metrics import Metrics
from draftree.serve.output import Delta, OutputStream, RequestOutput
from draftree.serve.protocol import Sampling
from draftree.serve.responses import (
    Call,
    api_error,
    best,
    statistics,
    stream,
    usage,
    whole_choice,
)
from draftree.serve.settings import ServerSettings
from draftree.serve.worker import Worker

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
# Errors of a value whose JSON type does not match a branch of a union.
OTHER_TYPE = {"string_type", "int_type", "float_type", "bool_type", "list_type", "dict_type", "model_type"}


async def whole_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the bytes of a body, up to the limit of its length.

    Raises:
        ApiError: the body is too long or too slow, the client has disconnected, or a page of another site sent no
            JSON (browsers send forms without asking the server first).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers and kind != "application/json":
        raise ApiError("The body is JSON: say so by the header Content-Type: application/json.", status=415)
    parts, size, most, seconds = [], 0, settings.body_bytes, settings.body_seconds
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise ApiError(f"The body is longer than {most} bytes: shorten it.", status=413)
                parts.append(piece)
    except TimeoutError:
        raise ApiError(f"The body was incomplete after {seconds:g} seconds: send it at once.", status=408) from None
    except ClientDisconnect:
        raise GoneError from None
    return b"".join(parts)


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects.

    Raises:
        GoneError: the client has disconnected.
    """
    done, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise GoneError
        return done.result()
    finally:
        gone.cancel()
        done.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def read_body(text: bytes, kind: type[Body]) -> Body:
    """Return a body as `kind`.

    Raises:
        ApiError: a field is unknown, missing or wrong; names the field.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise _as_sentence(error, text) from None


def _as_sentence(error: ValidationError, text: bytes) -> ApiError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return ApiError(f"The body is no JSON: {errors[0]['msg']}.")
    path, found = _deepest(errors, from_json(text, cache_strings="none"))
    place = ".".join(str(part) for part in path[:8])[:200]
    if found[0]["type"] in ("extra_forbidden", "none_required"):
        return ApiError(f"There is no field {place!r}, or it is not supported here: leave it out.", place)
    if found[0]["type"] == "missing":
        return ApiError(f"The field {place!r} is missing.", place)
    if not place:
        return ApiError("The body is no JSON object: send one with the fields of the request.")
    first, *others = dict.fromkeys(one["msg"] for one in found)
    expected = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    return ApiError(f"The field {place!r} has a wrong value: {expected}.", place)


def _deepest(errors: list[ErrorDetails], body: Any) -> tuple[list[str | int], list[ErrorDetails]]:
    """Return the place of the error deepest in the first wrong field, and the errors there.

    pydantic reports errors of all branches of a union. The deepest ones are from the branch that the client meant.
    """

    def reached(error: ErrorDetails) -> tuple[int, list[int], bool]:
        place = _place(error, body)
        return len(place), [part for part in place if isinstance(part, int)], error["type"] not in OTHER_TYPE

    errors = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = max(errors, key=reached)
    place = _place(first, body)
    return place, [one for one in errors if reached(one) == reached(first) and _place(one, body) == place]


def _place(error: ErrorDetails, body: Any) -> list[str | int]:
    """Return the place of an error in the body, without the names of union branches."""
    path: list[str | int] = []
    value, last = body, len(error["loc"]) - 1
    for i, part in enumerate(error["loc"]):
        try:
            value = value[part]
        except (KeyError, TypeError):
            if not (error["type"] == "missing" and i == last):
                continue
        path.append(part)
    return path


Read = TypeVar("Read")
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # Proxies such as nginx must not buffer streams.


class Server:
    """Hold the worker, the reader of calls and the metrics, and answer requests for the routes.

    Args:
        engine: the server closes it.
        tokenizer: the model's.
        settings: names and limits.

    Raises:
        ValueError: the model is an encoder-decoder.
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
        self.started = int(time.time())

    async def body(self, request: Request, kind: type[Body]) -> Body:
        """Return a request's body as `kind`.

        Raises:
            ApiError: see `whole_body` and `read_body`.
        """
        return read_body(await whole_body(request, self.settings), kind)

    async def read(self, reader: Callable[[Any, str | None], Read], body: Sampling, key: str | None) -> Read:
        """Return the result of a method of `calls` for a body, run in a thread.

        Args:
            reader: the method.
            body: of the request.
            key: API key of the request.

        Raises:
            ApiError: a field is wrong.
        """
        return await asyncio.to_thread(partial(reader, body, self.settings.cache_salt(key, body.user)))

    def key(self, request: Request) -> str | None:
        """Return the short name of a request's key; None if the server has no keys.

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

    async def start(self, answers: OutputStream) -> None:
        """Start answers in the worker.

        Raises:
            ApiError: the queue is full, the server is stopping, or the engine refuses a prompt.
        """
        cache_salt = answers.outputs[0].params.cache_salt
        try:
            self.worker.check_queue(len(answers.outputs))
            for drafter in self._tries:
                if not drafter.has_trie(cache_salt):  # Making one must not hold up the engine's thread.
                    await asyncio.to_thread(drafter.trie_of, cache_salt)
            await self.worker.start(answers)
        except (GrammarBusyError, ModelChangedError) as error:
            raise api_error(error) from None
        except ValueError as error:
            raise ApiError(str(error)) from None

    async def score(
        self, outputs: list[RequestOutput], count: int, tries: int, timeout: float
    ) -> list[list[TokenScores]]:
        """Return the scores of each output's prompt.

        Args:
            outputs: `tries` for each prompt.
            count: likeliest tokens to report for each position.
            tries: outputs of each prompt, which is scored once.
            timeout: seconds after which the request is refused.

        Raises:
            ApiError: the queue is full, the server is stopping, or scoring timed out.
        """
        found = await self.worker.score([output.prompt for output in outputs[::tries]], count, timeout)
        return [scores for scores in found for _ in range(tries)]

    async def answer(self, request: Request, call: Call, outputs: list[RequestOutput]) -> Response:
        """Return the response to a call, streamed or whole."""
        body, n, tries = call.body, call.body.n or 1, call.body.tries
        prompts = sum(len(output.prompt) for output in outputs) // tries
        deadline = time.monotonic() + min(self.settings.timeout, body.own.timeout or math.inf)
        if call.echo and call.logprobs is not None:
            scoring = self.score(outputs, call.logprobs, tries, deadline - time.monotonic())
            call.scores = await while_there(request, scoring)
        answers = OutputStream(outputs, deadline - time.monotonic(), self.worker.cancel, whole=not body.stream)
        if body.max_tokens != 0:
            await self.start(answers)
        else:  # The client wants the prompts alone.
            for index in range(len(outputs)):
                answers.deliver(Delta(index, finish="length"))
        if body.stream:
            return EventSourceResponse(stream(call, answers, prompts), headers=UNBUFFERED)
        whole = await self._whole(request, answers)
        kept = whole
        if tries > n:
            kept = [delta for i in range(0, len(whole), tries) for delta in best(whole[i : i + tries], n)]

        def chosen() -> list[dict[str, Any]]:
            return [whole_choice(call, delta, number, outputs[delta.index]) for number, delta in enumerate(kept)]

        # Decoding single tokens takes long, so that a thread does it.
        slow = call.logprobs is not None or body.own.trees
        choices = await asyncio.to_thread(chosen) if slow else chosen()
        found = call.envelope(chunk=False) | {"choices": choices, "usage": usage(outputs, prompts, call.prediction)}
        if body.own.stats:
            found["draftree"] = statistics(outputs)
        return Response(to_json(found), media_type="application/json")

    async def _whole(self, request: Request, answers: OutputStream) -> list[Delta]:
        """Return all answers in order; end them if the client disconnects."""

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
