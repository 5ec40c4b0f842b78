"""The FastAPI application: its routes, its OpenAPI description and its middleware."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.engine import Engine
from draftree.serve.chat import chat_prompt
from draftree.serve.http import REQUEST, REQUEST_ID, ApiError, GoneError, StoppingError
from draftree.serve.page import add_page
from draftree.serve.protocol import Chat, Completion, Corpus, Detokenize, Tokenize
from draftree.serve.responses import api_error
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings
from draftree.version import __version__

ANSWERS = ("/v1/completions", "/v1/chat/completions")  # may be streams
BODIES = (*ANSWERS, "/tokenize", "/detokenize", "/v1/corpus")
# What a request is answered with besides 200; every route may answer with the last ones.
REFUSALS = {
    400: "A field is wrong or missing, or a prompt does not fit the model.",
    404: "There is no such model.",
    408: "The body was not sent in time.",
    413: "The body is longer than this server reads.",
    415: "A page of another site sent something else than JSON.",
    429: "The queue is full: see Retry-After.",
    503: "The server is stopping, or could not answer in time.",
    401: "The API key is missing or unknown.",
    421: "The Host header names a host that this server does not answer for.",
    500: "The server failed: its log says why.",
}
EVERYWHERE = (421, 500)
WITH_KEY = (401, *EVERYWHERE)
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what FastAPI adds to the description of a route whose body is of this kind."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def description(app: FastAPI) -> dict[str, Any]:
    """Return the description of all routes of `app`: bodies, with their parts where references lead, and refusals."""
    found = app.openapi()
    parts = found.setdefault("components", {}).setdefault("schemas", {})
    parts["Error"] = ERROR
    for name, path in found["paths"].items():
        for method in path.values():
            if "requestBody" in method:
                parts |= method["requestBody"]["content"]["application/json"]["schema"].pop("$defs", {})
            method["responses"] = {"200": _success(name)} | {
                str(status): {"description": REFUSALS[status], "content": _json("Error")} for status in _refusals(name)
            }
    return found


def _success(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {}}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    elif path in ANSWERS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "Successful Response", "content": content}


def _refusals(path: str) -> list[int]:
    """Return the statuses with which a route may refuse a request, in order."""
    if path == "/health":
        found = [503, *EVERYWHERE]
    elif path == "/v1/models/{name}":
        found = [404, *WITH_KEY]
    elif path in BODIES:
        found = [400, 404, 408, 413, 415, 429, 503, *WITH_KEY]
    else:
        found = [*WITH_KEY]
    return sorted(found)


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def add_description(app: FastAPI, server: Server) -> None:
    """Put the route onto `app`."""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        server.key(request)
        return JSONResponse(description(app))


def add_extras(app: FastAPI, server: Server) -> None:
    """Put the routes onto `app`."""
    settings, tokenizer, calls = server.settings, server.tokenizer, server.calls

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        status = "stopping" if not server.worker.alive else "failing" if server.worker.failing else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        server.key(request)
        text = await asyncio.to_thread(server.metrics.text)  # which waits for a trie that learns
        return Response(text, media_type="text/plain; version=0.0.4")

    def model() -> dict[str, Any]:
        own = {"id": settings.model_name, "object": "model", "created": server.started, "owned_by": "draftree"}
        return own | {"root": settings.root or settings.model_name, "max_model_len": server.engine.target.max_positions}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        server.key(request)
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        server.key(request)
        calls.check_model(name)
        return JSONResponse(model())

    @app.get("/server_info")
    async def server_info(request: Request) -> Response:
        server.key(request)
        total, drafter = server.metrics.total, server.engine.config.drafter
        about = {
            "version": __version__,
            "model": settings.model_name,
            "runner": server.engine.runner.name,
            "drafter": None if drafter is None else drafter.name,
            "slots": settings.slots,
            "live": server.worker.live,
            "internal_states": [{"avg_spec_accept_length": total.acceptance_length}],
        }
        return JSONResponse(about)

    @app.post("/tokenize", openapi_extra=described(Tokenize))
    async def tokenize(request: Request) -> Response:
        server.key(request)
        body = await server.body(request, Tokenize)
        calls.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("Give a prompt or messages, one of both.", "prompt")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                message = "A chat has the special tokens of its template: leave add_special_tokens out."
                raise ApiError(message, "add_special_tokens")
            check, messages = partial(calls.check_bytes, field="messages"), body.messages
            options = {"add_generation_prompt": body.add_generation_prompt is not False}
            ids = await server.in_thread(lambda: chat_prompt(tokenizer, messages, check, **options))
        else:
            if body.add_generation_prompt is not None:
                message = "add_generation_prompt belongs to messages: leave it out, or give messages."
                raise ApiError(message, "add_generation_prompt")
            special = body.add_special_tokens is not False
            text = body.prompt or ""
            calls.check_bytes(text)
            ids = await server.in_thread(lambda: calls.encode(text, special=special))
        calls.check_length(ids, "prompt" if body.messages is None else "messages")
        limit = server.engine.target.max_positions
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids})

    @app.post("/detokenize", openapi_extra=described(Detokenize))
    async def detokenize(request: Request) -> Response:
        server.key(request)
        body = await server.body(request, Detokenize)
        calls.check_model(body.model)
        calls.check_length(body.tokens, "tokens")
        beyond = [token for token in body.tokens if token >= len(tokenizer)]
        if beyond:
            raise ApiError(f"There is no token {beyond[0]}: give ids below {len(tokenizer)}.", "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        server.key(request)
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return JSONResponse({name: getattr(tokenizer, name, None) for name in names})

    @app.post("/v1/corpus", openapi_extra=described(Corpus))
    async def corpus(request: Request) -> Response:
        key = server.key(request)
        body = await server.body(request, Corpus)
        tries = parts_of(server.engine.config.drafter, Lookahead)
        if not tries:
            raise ApiError("This server's drafter keeps no texts: serve with lookahead.", "texts")
        cache_salt = settings.cache_salt(key, body.user)

        def learn() -> int:
            rows = [calls.encode(text, special=False) for text in body.texts]
            for drafter in tries:
                drafter.warm(rows, cache_salt)
            return sum(map(len, rows))

        return JSONResponse({"texts": len(body.texts), "tokens": await server.in_thread(learn)})


log = logging.getLogger("draftree.serve")
MOST_LOGGED = 200  # characters of a path


def create_app(engine: Engine, tokenizer: Any, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves an engine's model.

    Args:
        engine: made with `keep_prefixes=True` for dialogues; belongs to the application, which closes it at its end.
        tokenizer: the model's.
        settings: names and limits; None for the defaults.

    Raises:
        ValueError: an encoder-decoder.
    """
    server = Server(engine, tokenizer, settings or ServerSettings())

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(server.worker.close)

    # FastAPI's own pages of documentation load scripts from elsewhere, and need no key.
    own: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None}
    app = FastAPI(title="draftree", version=__version__, lifespan=life, **own)
    app.state.server = server
    app.add_exception_handler(ApiError, _refuse)  # type: ignore[arg-type]
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_found)
    app.add_middleware(Watch, server=server)

    @app.post("/v1/completions", openapi_extra=described(Completion))
    async def completions(request: Request) -> Response:
        key = server.key(request)
        body = await server.body(request, Completion)
        call, parts = await server.read(server.calls.completion, body, key)
        return await server.answer(request, call, parts)

    @app.post("/v1/chat/completions", openapi_extra=described(Chat))
    async def chat_completions(request: Request) -> Response:
        key = server.key(request)
        body = await server.body(request, Chat)
        call, parts = await server.read(server.calls.chat, body, key)
        return await server.answer(request, call, parts)

    add_extras(app, server)
    add_page(app)
    add_description(app, server)
    return app


async def _refuse(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


async def _not_found(request: Request, error: Any) -> Response:
    found = ApiError(f"There is no {request.method} {request.url.path[:200]} here.", status=error.status_code)
    return JSONResponse(found.body(), found.status, error.headers)


class Watch:
    """Give every request an id, count its response, log it without its text, and report failures as API errors.

    Plain ASGI: a stream's events pass through it as they are.
    """

    def __init__(self, app: Any, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if 0 < len(given) <= 100 and all(32 < byte < 127 for byte in given) else uuid.uuid4().hex.encode()
        REQUEST_ID.set(name.decode())
        began, status = time.perf_counter(), 0
        failed: ApiError | None = None

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
                self._server.metrics.responded(status)
            await send(message)

        try:
            self._server.settings.check_host(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # by an ASGI server that stops, or that has lost the client
            alive = self._server.worker.alive
            failed = GoneError() if alive else StoppingError()
        except Exception as error:
            failed = api_error(error)
        try:
            if failed is not None and not status:  # else the connection breaks off, as the response is not complete
                await JSONResponse(failed.body(), failed.status, failed.headers())(scope, receive, watched)
        finally:
            path = "".join(char if char.isprintable() else "?" for char in scope["path"][:MOST_LOGGED])
            fields = {"request_id": name.decode(), "method": scope["method"], "path": path, "status": status}
            fields["seconds"] = round(time.perf_counter() - began, 4)
            log.info("%s %s %s %d %.4f", *fields.values(), extra={REQUEST: fields})
