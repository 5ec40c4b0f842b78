"""What the API is, in OpenAPI: `/openapi.json`, which those read who may use the server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from draftree.serve.server import Server


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """What FastAPI adds to the description of a route whose body is of this kind."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def description(app: FastAPI) -> dict[str, Any]:
    """The description of all routes of `app`, the parts of bodies where references lead."""
    found = app.openapi()
    parts = found.setdefault("components", {}).setdefault("schemas", {})
    for path in found["paths"].values():
        for method in path.values():
            if "requestBody" in method:
                parts |= method["requestBody"]["content"]["application/json"]["schema"].pop("$defs", {})
    return found


def add_description(app: FastAPI, server: Server) -> None:
    """Put the route onto `app`."""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        server.key(request)
        return JSONResponse(description(app))
