"""What the API is, in OpenAPI: `/openapi.json`, which those read who may use the server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from draftree.serve.server import Server

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
