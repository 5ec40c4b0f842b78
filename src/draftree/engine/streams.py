"""Iterators over a request's tokens that cancel it when they are closed or dropped, also before their first token.

A generator that has not begun runs no `finally`. So both are begun here: they stop at a first, bare `yield` within
their `try`, and whoever reads them goes on from there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from draftree.engine.request import Emitted, Request, State

Following = Callable[[Request, int], list[Emitted]]  # the tokens behind the first n; none where the text is over
Cancel = Callable[[Request], None]


def stream(request: Request, following: Following, cancel: Cancel) -> Generator[Emitted, None, None]:
    """The tokens of `request` one by one; `cancel` is called at the end, whatever brings it."""
    tokens = _stream(request, following, cancel)
    next(tokens)
    return tokens


def _stream(request: Request, following: Following, cancel: Cancel) -> Generator[Any, None, None]:
    given = 0
    try:
        yield
        while new := following(request, given):
            yield from new
            given += len(new)
    finally:
        cancel(request)


def astream(request: Request, following: Following, cancel: Cancel) -> AsyncGenerator[Emitted, None]:
    """The same for `async for`; `following` and `cancel` run in threads."""
    # An event loop closes the dropped generators that began in it. Outside of any, the reader's loop has to begin this.
    in_loop = sys.get_asyncgen_hooks().finalizer is not None
    tokens = _astream(request, following, cancel, begun=in_loop)
    if in_loop:
        with suppress(StopIteration):  # by which the coroutine returns what the bare `yield` gives
            tokens.asend(None).send(None)
    return tokens


async def _astream(request: Request, following: Following, cancel: Cancel, *, begun: bool) -> AsyncGenerator[Any, None]:
    given = 0
    # Threads of its own: those of the event loop are few, and all might wait for texts that are not begun. One reads,
    # which may go on when its reader has been cancelled, and one cancels.
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(2, "draftree-stream")
    try:
        if begun:
            yield
        while new := await loop.run_in_executor(threads, following, request, given):
            for emitted in new:
                yield emitted
            given += len(new)
    finally:
        if request.state is not State.FINISHED:  # in a thread, as it waits for a step under way
            await asyncio.shield(loop.run_in_executor(threads, cancel, request))
        threads.shutdown(wait=False)
