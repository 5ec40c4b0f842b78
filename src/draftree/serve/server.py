"""Read bodies, check keys, and answer or refuse requests, for all routes."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.requests import ClientDisconnect

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.engine import Engine
from draftree.errors import ModelChangedError
from draftree.grammar import GrammarBusyError
from draftree.serve.calls import CallReader
from draftree.serve.metrics import Metrics
from draftree.serve.output import Delta, OutputStream, RequestOutput
from draftree.serve.protocol import Common
from draftree.serve.respond import Respond, response_events, whole_response
from draftree.serve.responses import Call, api_error, events, statistics, usage, whole_choice
from draftree.serve.settings import ApiError, GoneError, ServerSettings
from draftree.serve.templates import with_template
from draftree.serve.worker import Worker

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Asked = TypeVar("Asked", bound=Common)
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # Proxies such as nginx must not buffer streams.
JSON = "application/json"
IGNORED = "X-Draftree-Ignored"  # Header that names the fields of a request without effect.


async def whole_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the bytes of a body, up to the limit of its length."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers and kind != "application/json":
        raise ApiError("The body is JSON: say so by the header Content-Type: application/json.", status=415)
    parts, size, most, seconds = [], 0, settings.max_body_bytes, settings.body_seconds
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
    """Return the result of `work`; cancel it if the client disconnects."""
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
    """Return a body as `kind`."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise _as_sentence(error, text) from None


def _as_sentence(error: ValidationError, text: bytes) -> ApiError:
    """Return the error deepest in the first wrong field.

    pydantic reports errors of all branches of a union; the deepest ones are from the branch that the client meant.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return ApiError(f"The body is no JSON: {errors[0]['msg']}.")
    body = from_json(text, cache_strings="none")
    places = [(_place(one, body), one) for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    deepest = max((place for place, _ in places), key=lambda place: (len(place), str(place[-1:])))
    place = ".".join(str(part) for part in deepest[:8])[:200]
    found = [one for path, one in places if path == deepest]
    if found[0]["type"] == "extra_forbidden":
        return ApiError(f"There is no field {place!r}, or it is not supported here: leave it out.", place)
    if found[0]["type"] == "missing":
        return ApiError(f"The field {place!r} is missing.", place)
    if re.fullmatch(r"(messages|input)\.\d+\.content\.\d+\.type", place):
        return ApiError(
            f"The field {place!r} is no text and no image_url, which are all that is read: leave this part out.",
            place,
        )
    if not place:
        return ApiError("The body is no JSON object: send one with the fields of the request.")
    first, *others = dict.fromkeys(one["msg"] for one in found)
    expected = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    return ApiError(f"The field {place!r} has a wrong value: {expected}.", place)


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


class Server:
    """Hold the worker, the reader of calls and the metrics, and answer requests for the routes."""

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings) -> None:
        if engine.target.encoder_decoder:
            raise ValueError("The server answers for decoder-only models: use draftree.generate for encoder-decoders.")
        tokenizer = with_template(tokenizer, settings.tool_parser)
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.metrics = Metrics(engine)
        self.worker = Worker(engine, tokenizer, self.metrics, settings.queue)
        self.calls = CallReader(engine, tokenizer, settings)
        self.tries = parts_of(engine.config.drafter, Lookahead)
        self.started = int(time.time())

    def key(self, request: Request) -> str | None:
        """Return the short name of a request's key; see `ServerSettings.check_key`."""
        return self.settings.check_key(request.headers.get("authorization"))

    async def body(self, request: Request, kind: type[Body]) -> Body:
        """Return a request's body as `kind`; see `whole_body` and `read_body`."""
        return read_body(await whole_body(request, self.settings), kind)

    async def respond(
        self,
        request: Request,
        kind: type[Asked],
        reader: Callable[[Asked, str | None], tuple[Call, list[RequestOutput]]],
    ) -> Response:
        """Return the response to a completion or a chat, streamed or whole."""
        key = self.key(request)
        asked = await self.body(request, kind)
        call, outputs = await asyncio.to_thread(reader, asked, self.settings.cache_salt(key, asked.user))
        body = call.body
        deadline = time.monotonic() + min(self.settings.timeout, body.own.timeout or math.inf)
        if call.echo and call.logprobs is not None:
            prompts = [output.prompt for output in outputs[:: body.count]]  # Each prompt is scored once.
            scoring = self.worker.score(prompts, call.logprobs, deadline - time.monotonic())
            call.scores = [scores for scores in await while_there(request, scoring) for _ in range(body.count)]
        stream = OutputStream(outputs, deadline - time.monotonic(), self.worker.cancel, whole=not body.stream)
        if body.max_tokens == 0:  # The client wants the prompts alone.
            for index in range(len(outputs)):
                stream.deliver(Delta(index, finish="length"))
        else:
            await self._start(stream)
        headers = {IGNORED: ", ".join(call.unused)} if call.unused else {}
        if body.stream:
            written = response_events(call, asked, stream) if isinstance(asked, Respond) else events(call, stream)
            return EventSourceResponse(written, headers=UNBUFFERED | headers)
        whole = await self._whole(request, stream)
        if isinstance(asked, Respond):
            return Response(to_json(whole_response(call, asked, whole[0], outputs)), headers=headers, media_type=JSON)
        found = await self._choices(call, whole, stream)
        return Response(to_json(found), headers=headers, media_type=JSON)

    async def _start(self, stream: OutputStream) -> None:
        """Start outputs in the worker."""
        cache_salt = stream.outputs[0].params.cache_salt
        try:
            self.worker.check_queue(len(stream.outputs))
            for drafter in self.tries:
                if not drafter.has_trie(cache_salt):  # A thread makes it, so that the engine's thread does not wait.
                    await asyncio.to_thread(drafter.trie_of, cache_salt)
            await self.worker.start(stream)
        except (GrammarBusyError, ModelChangedError) as error:
            raise api_error(error) from None
        except ValueError as error:
            raise ApiError(str(error)) from None

    async def _whole(self, request: Request, stream: OutputStream) -> list[Delta]:
        """Return whole outputs; end them if the client disconnects."""

        async def collected() -> list[Delta]:
            found = [delta async for delta in stream.deltas() if delta is not None]
            return sorted(found, key=lambda delta: delta.index)

        try:
            return await while_there(request, collected())
        except BaseException as error:
            stream.cancel()
            if not isinstance(error, Exception):
                raise
            raise api_error(error) from None

    async def _choices(self, call: Call, whole: list[Delta], stream: OutputStream) -> dict[str, Any]:
        """Return the object of a completion or a chat."""
        body = call.body

        def choices() -> list[dict[str, Any]]:
            return [whole_choice(call, delta, i, stream.outputs[delta.index]) for i, delta in enumerate(whole)]

        # Decoding single tokens takes long, so that a thread does it.
        slow = call.logprobs is not None or body.own.trees
        found = call.envelope(chunk=False) | {"choices": await asyncio.to_thread(choices) if slow else choices()}
        found["usage"] = usage(call, stream.outputs)
        if body.own.stats:
            found["draftree"] = statistics(stream.outputs)
        return found
