"""All that makes a server in one value, which other processes can be given: model, drafter, settings."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from draftree.engine import Engine
from draftree.models import load_model
from draftree.placement import Placement
from draftree.runner import pack_own
from draftree.serve.app import create_app
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings

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
