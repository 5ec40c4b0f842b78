"""Start a server: its options as one value that other processes can receive, and its graceful end."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from draftree.engine import Engine
from draftree.models import load_model
from draftree.placement import Placement
from draftree.runner import pack_own
from draftree.serve.app import create_app
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings
from draftree.serve.worker import Worker

MOST_HEAD = 64 << 10  # bytes of a request's line and headers
GRACE = 10.0  # seconds that running answers have when the server is told to stop
KEEP_ALIVE = 75  # more than the minute after which common balancers close a connection that is idle
SENDING = 5  # seconds more, in which what has been answered by then is sent
TOO_LARGE = b"The request line and headers are larger than 64 KiB: shorten them."


class HeadTooLargeError(Exception):
    """A request's line and headers are larger than `MOST_HEAD`."""


class BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol, which answers 431 to heads of more than `MOST_HEAD` bytes.

    httptools collects a header until it is whole, however long it is, before the application can check a key.
    """

    _in_head = True
    _received = _parsed = 0  # bytes of the present head: as they arrived, and of complete headers
    _too_large = False

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`; bounds what has arrived of an unfinished head."""
        if self._in_head:
            self._received += len(data)
        super().data_received(data)
        if self._in_head and self._received > MOST_HEAD and not self._too_large:
            self._too_large = True
            self.send_400_response("")

    def on_url(self, url: bytes) -> None:
        """Count the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > MOST_HEAD:
            self._too_large = True
            raise HeadTooLargeError  # the parser stops, and `data_received` answers by `send_400_response`

    def on_headers_complete(self) -> None:
        """Leave the head."""
        self._in_head, self._received, self._parsed = False, 0, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Await the next head on this connection."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, with status 431 where it is too large, and close the connection."""
        if not self._too_large:
            super().send_400_response(msg)
            return
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self.transport.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(TOO_LARGE) + TOO_LARGE)
        self.transport.close()


class GracefulServer(uvicorn.Server):
    """uvicorn's server, which goes on listening until the worker has stopped, so that clients hear that it stops.

    Args:
        worker: of the application.
        grace: seconds that running answers have.
        keep_alive: seconds that a connection may be idle after an answer before it is closed.
        config: of uvicorn; `app` is the application.
    """

    def __init__(self, worker: Worker, *, grace: float = GRACE, keep_alive: int = KEEP_ALIVE, **config: Any) -> None:
        config |= {"access_log": False, "timeout_graceful_shutdown": SENDING, "timeout_keep_alive": keep_alive}
        config["http"] = BoundedHead
        super().__init__(uvicorn.Config(**config))
        self._worker, self._grace = worker, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the worker, then the server; a second Ctrl-C breaks off at once what runs."""
        closing = Thread(target=self._worker.close, args=(self._grace,), name="draftree-closing", daemon=True)
        closing.start()  # not in asyncio's own threads, which may all be at work
        while closing.is_alive() and not self.force_exit:
            await asyncio.sleep(0.05)
        if closing.is_alive():
            self._worker.close()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn does not end the application then, and the loop's end would log a traceback
            await self.lifespan.shutdown()


log = logging.getLogger("draftree.serve")
SWITCH = 0.0005  # seconds that the thread of the engine may keep the one that sends tokens waiting


@dataclass(frozen=True)
class Launch:
    """How a server is made.

    Attributes:
        model: folder or hub name; None for the embedded model.
        parts: of the model and its tokenizer, makes `drafter` and `pruner` as `Engine` takes them; can be pickled.
        settings: names and limits.
        runner, strict: of `Engine`.
        threads: CPU threads; None leaves them to torch.
        placement: device and type of the model.
    """

    model: str | None
    parts: Callable[[Any, Any], dict[str, Any]]
    settings: ServerSettings = field(default_factory=ServerSettings)
    runner: str = "auto"
    strict: bool = False
    threads: int | None = None
    placement: Placement = field(default_factory=Placement)

    def app(self) -> FastAPI:
        """Load the model and make the application, in a process that is the server's own.

        Raises:
            ValueError: a model, drafter or option that cannot be.
        """
        made = create_app(*self._made(), self.settings)
        # What was loaded stays for as long as the process does. Python's collector would go through it again and again,
        # and wait with what requests leave until that is a quarter as much; it learns by the second call what is left.
        gc.collect()
        gc.freeze()
        gc.collect()
        return made

    def _made(self) -> tuple[Engine, Any]:
        """The engine, and the model's tokenizer."""
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
        """Make what the application is of once and drop it, for those who make it elsewhere and want to know before.

        FastAPI keeps the routes of an application, and with them the model, for as long as the process lasts.

        Raises:
            ValueError: as `app`.
        """
        Server(*self._made(), self.settings).worker.close()
        import torch

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # for those who make it, who may be on this device
