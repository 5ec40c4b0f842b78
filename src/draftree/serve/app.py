"""Build the FastAPI application: routes, OpenAPI description and middleware; start it, and end it gracefully."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import logging
import re
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from draftree import __version__
from draftree.checkpoints import Placement
from draftree.engine import Engine
from draftree.models import load_model
from draftree.pages import fill
from draftree.runner import pack_own
from draftree.serve.protocol import Chat, Completion, Corpus, Detokenize, Tokenize
from draftree.serve.respond import Respond
from draftree.serve.responses import api_error
from draftree.serve.server import Server
from draftree.serve.settings import REQUEST_ID, ApiError, GoneError, ServerSettings, StoppingError
from draftree.serve.worker import Worker


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a route's body."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_description(app: FastAPI, server: Server) -> None:
    """Add /openapi.json to `app`, with the parts of bodies under `components`."""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        server.key(request)
        found = app.openapi()
        parts = found.setdefault("components", {}).setdefault("schemas", {})
        for method in (method for path in found["paths"].values() for method in path.values()):
            if "requestBody" in method:
                parts |= method["requestBody"]["content"]["application/json"]["schema"].pop("$defs", {})
        return JSONResponse(found)


def add_status(app: FastAPI, server: Server) -> None:
    """Add health, metrics, models and information about the server to `app`."""
    settings = server.settings

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        status = "stopping" if not server.worker.alive else "failing" if server.worker.failing else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        server.key(request)
        text = await asyncio.to_thread(server.metrics.text)  # Reading a trie's size waits while it learns.
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
        server.calls.check_model(name)
        return JSONResponse(model())

    @app.get("/server_info")
    async def server_info(request: Request) -> Response:
        server.key(request)
        drafter = server.engine.config.drafter
        about = {
            "version": __version__,
            "model": settings.model_name,
            "runner": server.engine.runner.name,
            "drafter": None if drafter is None else drafter.name,
            "slots": settings.slots,
            "live": server.worker.live,
            "internal_states": [{"avg_spec_accept_length": server.metrics.total.acceptance_length}],
        }
        return JSONResponse(about)


def add_texts(app: FastAPI, server: Server) -> None:
    """Add the tokenizer and the corpus to `app`."""
    tokenizer, calls = server.tokenizer, server.calls

    @app.post("/tokenize", openapi_extra=described(Tokenize))
    async def tokenize(request: Request) -> Response:
        server.key(request)
        body = await server.body(request, Tokenize)
        ids = await asyncio.to_thread(calls.tokenize, body)
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
        if not server.tries:
            raise ApiError("This server's drafter has no trie: serve with lookahead.", "texts")
        cache_salt = server.settings.cache_salt(key, body.user)

        def learn() -> int:
            rows = [calls.encode(text, special=False) for text in body.texts]
            for drafter in server.tries:
                drafter.warm(rows, cache_salt)
            return sum(map(len, rows))

        return JSONResponse({"texts": len(body.texts), "tokens": await asyncio.to_thread(learn)})


def add_page(app: FastAPI) -> None:
    """Serve the page that shows draft trees at `/`; its content security policy allows no other addresses."""
    page = fill("draftree.serve", "markdown.js")
    headers = {"Content-Security-Policy": policy(page), "X-Content-Type-Options": "nosniff"}
    headers |= {"Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}

    @app.get("/", include_in_schema=False)
    async def home() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def policy(page: str) -> str:
    """Return the content security policy of a page: its own style and script, by digest, and this server."""
    allowed = {"connect-src": "'self'", "img-src": "data:"}
    for element in ("style", "script"):
        found = re.search(rf"<{element}>(.*?)</{element}>", page, re.S)
        assert found is not None
        digest = hashlib.sha256(found[1].encode()).digest()
        allowed[f"{element}-src"] = f"'sha256-{base64.b64encode(digest).decode()}'"
    refused = ("default-src", "base-uri", "form-action", "frame-ancestors")
    rules = dict.fromkeys(refused, "'none'") | allowed
    return "; ".join(f"{name} {value}" for name, value in rules.items())


log = logging.getLogger("draftree.serve")
LOGGED_PATH = 200  # Characters of a path in the log.


def create_app(engine: Engine, tokenizer: Any, settings: ServerSettings | None = None) -> FastAPI:
    """Return the application that serves an engine's model.

    Args:
        engine: with `keep_prefixes=True` for dialogues; the application closes it at its end.
        settings: names and limits; None for the defaults.

    Raises:
        ValueError: the model is an encoder-decoder.
    """
    server = Server(engine, tokenizer, settings or ServerSettings())

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(server.worker.close)

    # FastAPI's own documentation pages load scripts from other hosts and need no key.
    own: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None}
    app = FastAPI(title="draftree", version=__version__, lifespan=life, **own)
    app.state.server = server
    app.add_exception_handler(ApiError, _refuse)  # type: ignore[arg-type]
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_found)
    app.add_middleware(Watch, server=server)

    @app.post("/v1/completions", openapi_extra=described(Completion))
    async def completions(request: Request) -> Response:
        return await server.respond(request, Completion, server.calls.completion)

    @app.post("/v1/chat/completions", openapi_extra=described(Chat))
    async def chat_completions(request: Request) -> Response:
        return await server.respond(request, Chat, server.calls.chat)

    @app.post("/v1/responses", openapi_extra=described(Respond))
    async def responses(request: Request) -> Response:
        return await server.respond(request, Respond, server.calls.respond)

    add_status(app, server)
    add_texts(app, server)
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
        except asyncio.CancelledError:  # The ASGI server stops, or has lost the client.
            failed = GoneError() if self._server.worker.alive else StoppingError()
        except Exception as error:
            failed = api_error(error)
        try:
            if failed is not None and not status:  # A response that has begun can only be broken off.
                await JSONResponse(failed.body(), failed.status, failed.headers())(scope, receive, watched)
        finally:
            path = "".join(char if char.isprintable() else "?" for char in scope["path"][:LOGGED_PATH])
            seconds = time.perf_counter() - began
            log.info("%s %s %s %d %.4f", name.decode(), scope["method"], path, status, seconds)


SWITCH = 0.0005  # Seconds that the engine's thread may delay the event loop.
GRACE = 10.0  # Seconds that running requests have when the server stops.
KEEP_ALIVE = 75  # Common load balancers close idle connections after 60 seconds.
SENDING = 5  # Seconds more to send finished responses.


class GracefulServer(uvicorn.Server):
    """Run uvicorn's server, and listen until the worker has stopped, so that clients get a clear refusal."""

    def __init__(self, worker: Worker, *, grace: float = GRACE, keep_alive: int = KEEP_ALIVE, **config: Any) -> None:
        config |= {"access_log": False, "timeout_graceful_shutdown": SENDING, "timeout_keep_alive": keep_alive}
        super().__init__(uvicorn.Config(**config))
        self._worker, self._grace = worker, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the worker, then the server; a second Ctrl-C ends running outputs at once."""
        closing = Thread(target=self._worker.close, args=(self._grace,), name="draftree-closing", daemon=True)
        closing.start()  # The threads of asyncio may all be busy.
        while closing.is_alive() and not self.force_exit:
            await asyncio.sleep(0.05)
        if closing.is_alive():
            self._worker.close()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, and the loop's end would log a traceback.
            await self.lifespan.shutdown()


@dataclass(frozen=True)
class Launch:
    """Hold everything that a process needs to make a server; can be pickled.

    Attributes:
        model: folder or hub name; None for the embedded model.
        parts: makes `drafter` and `pruner` for `Engine` from the model and its tokenizer.
        runner, strict: see `Engine`.
        threads: CPU threads; None for torch's default.
    """

    model: str | None
    parts: Callable[[Any, Any], dict[str, Any]]
    settings: ServerSettings = field(default_factory=ServerSettings)
    runner: str = "auto"
    strict: bool = False
    threads: int | None = None
    placement: Placement = field(default_factory=Placement)

    def app(self) -> FastAPI:
        """Load the model and make the application, in the server's own process."""
        made = create_app(*self._made(), self.settings)
        gc.collect()
        gc.freeze()  # Python's collector need not scan the model again and again.
        gc.collect()  # This call updates the size by which the collector decides when to run.
        return made

    def _made(self) -> tuple[Engine, Any]:
        """Return the engine and the model's tokenizer."""
        sys.setswitchinterval(SWITCH)
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        model, tokenizer = load_model(self.model, self.placement, log.info)
        pack_own(model, self.runner)
        parts, slots = self.parts(model, tokenizer), self.settings.slots
        engine = Engine(model, **parts, slots=slots, runner=self.runner, strict=self.strict, keep_prefixes=True)
        return engine, tokenizer

    def check(self) -> None:
        """Make the parts of the application once and drop them, to find errors before replicas start."""
        Server(*self._made(), self.settings).worker.close()
        import torch

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # Replicas may use this device.
