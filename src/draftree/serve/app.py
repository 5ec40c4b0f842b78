"""The HTTP application: routes, request ids, errors as the API has them, and the life of the worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from draftree.engine import Engine
from draftree.serve.answers import api_error
from draftree.serve.description import add_description, described
from draftree.serve.errors import ApiError, GoneError, StoppingError
from draftree.serve.extras import add_extras
from draftree.serve.logs import REQUEST, REQUEST_ID
from draftree.serve.page import add_page
from draftree.serve.schema import Chat, Completion
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings
from draftree.version import __version__

log = logging.getLogger("draftree.serve")
MOST_LOGGED = 200  # characters of a path
UNREAD = 60.0  # seconds that a client may leave unread what was sent to it, once buffers are full


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
        call, parts = await server.read(request, server.calls.completion, body, key)
        return await server.answer(request, call, parts)

    @app.post("/v1/chat/completions", openapi_extra=described(Chat))
    async def chat_completions(request: Request) -> Response:
        key = server.key(request)
        body = await server.body(request, Chat)
        call, parts = await server.read(request, server.calls.chat, body, key)
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


class UnreadError(Exception):
    """A client has left unread what was sent to it for too long."""


class Watch:
    """Gives every request an id, counts its response, logs it without what it says, and answers where that failed.

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
            try:
                async with asyncio.timeout(UNREAD):
                    await send(message)
            except TimeoutError:
                raise UnreadError from None

        try:
            self._server.settings.check_host(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # by an ASGI server that stops, or that has lost the client
            alive = self._server.worker.alive
            failed = GoneError() if alive else StoppingError()
        except UnreadError:  # the answers end, and the connection breaks off
            status = 499
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
