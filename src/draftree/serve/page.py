"""Serve the page at `/`, which shows the draft trees of each output.

The page is one file; the content security policy in its headers allows no other script, style or address.
"""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi import FastAPI, Response

from draftree.pages import fill


def add_page(app: FastAPI) -> None:
    """Add the page to `app`."""
    page = fill("draftree.serve")
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
