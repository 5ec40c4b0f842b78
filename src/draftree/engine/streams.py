"""Iterators over a request's tokens that end it when they are closed or dropped, also before their first token.

A generator that has not begun runs no `finally`. So both stand at a bare `yield` inside of theirs when they are given.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Any

from draftree.engine.request import Emitted, Request, State

Following = Callable[[Request, int], list[Emitted]]  # the tokens behind the first n; none where the text is over


def stream(request: Request, following: Following, cancel: Callable[[Request], None]) -> Generator[Emitted, None, None]:
    """The tokens of `request` one by one; `cancel` is called at the end, whatever brings it."""
    begun: Generator[Any, None, None] = _stream(request, following, cancel)
    next(begun)
    return begun


def _stream(request: Request, following: Following, cancel: Callable[[Request], None]) -> Generator[Any, None, None]:
    given = 0
    try:
        yield
        while new := following(request, given):
            yield from new
            given += len(new)
    finally:
        cancel(request)


def astream(request: Request, following: Following, cancel: Callable[[Request], None]) -> AsyncGenerator[Emitted, None]:
    """The same for `async for`; `following` and `cancel` run in threads."""
    looped = sys.get_asyncgen_hooks().finalizer is not None  # else no event loop would end it: it begins in one, later
    begun: AsyncGenerator[Any, None] = _astream(request, following, cancel, stands=looped)
    if looped:
        with suppress(StopIteration):  # which brings the bare yield
            begun.__anext__().__await__().__next__()
    return begun


async def _astream(
    request: Request, following: Following, cancel: Callable[[Request], None], *, stands: bool
) -> AsyncGenerator[Any, None]:
    given = 0
    try:
        if stands:
            yield
        while new := await asyncio.to_thread(following, request, given):
            for emitted in new:
                yield emitted
            given += len(new)
    finally:
        if request.state is not State.FINISHED:  # a step under way ends first, and nobody waits for it here
            await asyncio.shield(asyncio.to_thread(cancel, request))
