"""uvicorn as draftree runs it: the head of a request is bounded, and running answers may end when the server stops."""

from __future__ import annotations

import asyncio
import socket
from threading import Thread
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
