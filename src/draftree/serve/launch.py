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

from draftree.engine import Engine
from draftree.models import load_model
from draftree.placement import Placement
from draftree.runner import pack_own
from draftree.serve.app import create_app
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings
from draftree.serve.worker import Worker

log = logging.getLogger("draftree.serve")
SWITCH = 0.0005  # Seconds that the engine's thread may delay the event loop.
GRACE = 10.0  # Seconds that running requests have when the server stops.
KEEP_ALIVE = 75  # Common load balancers close idle connections after 60 seconds.
SENDING = 5  # Seconds more to send finished responses.


class GracefulServer(uvicorn.Server):
    """Run uvicorn's server, and listen until the worker has stopped, so that clients get a clear refusal.

    Args:
        worker: of the application.
        grace: seconds that running answers have.
        keep_alive: seconds after which an idle connection is closed.
        config: options of uvicorn; `app` is the application.
    """

    def __init__(self, worker: Worker, *, grace: float = GRACE, keep_alive: int = KEEP_ALIVE, **config: Any) -> None:
        config |= {"access_log": False, "timeout_graceful_shutdown": SENDING, "timeout_keep_alive": keep_alive}
        super().__init__(uvicorn.Config(**config))
        self._worker, self._grace = worker, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the worker, then the server; a second Ctrl-C ends running answers at once."""
        closing = Thread(target=self._worker.close, args=(self._grace,), name="draftree-closing", daemon=True)
        closing.start()  # asyncio's threads may all be busy.
        while closing.is_alive() and not self.force_exit:
            await asyncio.sleep(0.05)
        if closing.is_alive():
            self._worker.close()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, and the loop's end would log a traceback.
            await self.lifespan.shutdown()


@dataclass(frozen=True)
class Launch:
    """Hold everything that a process needs to make a server; can be pickled.

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
            ValueError: a wrong model, drafter or option.
        """
        made = create_app(*self._made(), self.settings)
        # The model lives as long as the process. Freezing it keeps Python's collector from scanning it again and again.
        # The second call updates the size by which the collector decides when to run.
        gc.collect()
        gc.freeze()
        gc.collect()
        return made

    def _made(self) -> tuple[Engine, Any]:
        """Return the engine and the model's tokenizer."""
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
        """Make the application's parts once and drop them, to find errors before replicas start.

        FastAPI keeps the routes of an application, and with them the model, for as long as the process lasts.

        Raises:
            ValueError: as `app`.
        """
        Server(*self._made(), self.settings).worker.close()
        import torch

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # Replicas may use this device.
