"""Routes besides answers: models, tokens, health, metrics, and texts for the trie."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.serve.description import described
from draftree.serve.errors import ApiError
from draftree.serve.messages import chat_prompt
from draftree.serve.schema import Corpus, Detokenize, Tokenize
from draftree.serve.server import Server
from draftree.version import __version__


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
            ids = await server.in_thread(request, lambda: chat_prompt(tokenizer, messages, check, **options))
        else:
            if body.add_generation_prompt is not None:
                message = "add_generation_prompt belongs to messages: leave it out, or give messages."
                raise ApiError(message, "add_generation_prompt")
            special = body.add_special_tokens is not False
            text = body.prompt or ""
            calls.check_bytes(text)
            ids = await server.in_thread(request, lambda: calls.encode(text, special=special))
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

        return JSONResponse({"texts": len(body.texts), "tokens": await server.in_thread(request, learn)})
