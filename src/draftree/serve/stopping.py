"""How a server stops: it says so and takes nothing new, while what runs may end; what is left then is broken off."""

from __future__ import annotations

import asyncio
import socket
from threading import Thread
from typing import Any

import uvicorn

from draftree.serve.worker import Worker

GRACE = 10.0  # seconds that running answers have when the server is told to stop
KEEP_ALIVE = 75  # more than the minute after which common balancers close a connection that is idle
SENDING = 5  # seconds more, in which what has been answered by then is sent


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
