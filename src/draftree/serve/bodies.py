"""What clients send, as a kind of `schema.py` or a sentence about what is wrong, and whether they are still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from draftree.serve.errors import ApiError, GoneError
from draftree.serve.settings import ServerSettings

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
MOST_ERRORS = 1000  # that are looked at: each takes the parser some microseconds to tell
# Errors that say that a value is of another JSON type than a branch of a union takes.
OTHER_TYPE = {"string_type", "int_type", "float_type", "bool_type", "list_type", "dict_type", "model_type"}


async def whole_body(request: Request, settings: ServerSettings) -> bytes:
    """The bytes of a body, read no further than it may be long.

    Raises:
        ApiError: too long, too slow, or the client has gone away meanwhile; a form or text out of a page of another
            site, which browsers send without asking the server first.
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
        raise ApiError(f"The body was not there after {seconds:g} seconds: send it at once.", status=408) from None
    except ClientDisconnect:
        raise GoneError from None
    return b"".join(parts)


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` brings; a client that goes away ends it.

    Raises:
        GoneError: the client has gone.
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
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def read_body(text: bytes, kind: type[Body]) -> Body:
    """A body as `kind`.

    Raises:
        ApiError: it is not of this kind; names the field.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise _as_sentence(error, text) from None


def _as_sentence(error: ValidationError, text: bytes) -> ApiError:
    if error.error_count() > MOST_ERRORS:
        return ApiError(f"The body has {error.error_count()} fields that are unknown or wrong: correct them.")
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return ApiError(f"The body is no JSON: {errors[0]['msg']}.")
    path, found = _of_best_branch(errors, from_json(text, cache_strings="none"))
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


def _of_best_branch(errors: list[ErrorDetails], body: Any) -> tuple[list[str | int], list[ErrorDetails]]:
    """Where the first thing is that is wrong, and what; of a union, by the branch that came furthest, or by all alike.

    pydantic tells the errors of all branches, each with the branch's name amid the fields.
    """
    path, at = _place(errors[0], body)
    if at is None:
        return path, errors[:1]
    branches: dict[str | int, ErrorDetails] = {}
    for error in errors:
        if error["loc"][:at] == errors[0]["loc"][:at]:
            branches.setdefault(error["loc"][at], error)

    def reached(error: ErrorDetails) -> tuple[bool, int, list[int], bool]:
        place, too_long = _place(error, body)[0], error["type"] == "too_long"  # all up to its bound was right
        return too_long, len(place), [part for part in place if isinstance(part, int)], error["type"] not in OTHER_TYPE

    best = max(map(reached, branches.values()))
    found = [error for error in branches.values() if reached(error) == best]
    return _place(found[0], body)[0], found


def _place(error: ErrorDetails, body: Any) -> tuple[list[str | int], int | None]:
    """Where in a body an error is, without names of branches, and which part of its `loc` is the first such name."""
    path: list[str | int] = []
    branch, value = None, body
    for i, part in enumerate(error["loc"]):
        try:
            value = value[part]
        except (KeyError, TypeError):
            if error["type"] != "missing" or i < len(error["loc"]) - 1:
                branch = i if branch is None else branch
                continue
        path.append(part)
    return path, branch
