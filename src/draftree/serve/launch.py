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
        worker: worker of the application.
        grace: seconds that running outputs have.
        keep_alive: seconds after which an idle connection is closed.
        config: options of uvicorn; `app` is the application.
    """

    def __init__(self, worker: Worker, *, grace: float = GRACE, keep_alive: int = KEEP_ALIVE, **config: Any) -> None:
        config |= {"access_log": False, "timeout_graceful_shutdown": SENDING, "timeout_keep_alive": keep_alive}
        super().__init__(uvicorn.Config(**config))
        self._worker, self._grace = worker, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the worker, then the server; a second Ctrl-C ends running outputs at once."""
        closing = Thread(target=self._worker.close, args=(self._grace,), name="draftree-closing", daemon=True)
        closing.start()  # The threads of asyncio may all be busy.
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
        parts: makes `drafter` and `pruner` for `Engine` from the model and its tokenizer.
        settings: names and limits.
        runner, strict: see `Engine`.
        threads: CPU threads; None for torch's default.
        placement: device and dtype of the model.
    """

    model: str | None
    parts: Callable[[Any, Any], dict[str, Any]]
    settings: ServerSettings = field(default_factory=ServerSettings)
    runner: str = "auto"
    strict: bool = False
    threads: int | None = None
    placement: Placement = field(default_factory=Placement)

    def app(self) -> FastAPI:
        """Load the model and make the application, in the server's own process.

        Raises:
            ValueError: a wrong model, drafter or option.
        """
        made = create_app(*self._made(), self.settings)
        gc.collect()
        gc.freeze()  # Python's collector need not scan the model again and again.
        gc.collect()  # This call updates the size by which the collector decides when to run.
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
        """Make the parts of the application once and drop them, to find errors before replicas start.

        Raises:
            ValueError: see `app`.
        """
        Server(*self._made(), self.settings).worker.close()
        import torch

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # Replicas may use this device.
