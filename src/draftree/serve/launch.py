"""All that makes a server in one value, which other processes can be given: model, drafter, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from draftree.engine import Engine
from draftree.models import load_model
from draftree.serve.app import create_app
from draftree.serve.settings import ServerSettings


@dataclass(frozen=True)
class Launch:
    """How a server is made.

    Attributes:
        model: folder or hub name; None for the embedded model.
        parts: of the model and its tokenizer, makes `drafter` and `pruner` as `Engine` takes them; can be pickled.
        settings: names and limits.
        runner, strict: of `Engine`.
        threads: CPU threads; None leaves them to torch.
    """

    model: str | None
    parts: Callable[[Any, Any], dict[str, Any]]
    settings: ServerSettings = field(default_factory=ServerSettings)
    runner: str = "auto"
    strict: bool = False
    threads: int | None = None

    def app(self) -> FastAPI:
        """Load the model and make the application.

        Raises:
            ValueError: a model, drafter or option that cannot be.
        """
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        model, tokenizer = load_model(self.model)
        parts, slots = self.parts(model, tokenizer), self.settings.slots
        engine = Engine(model, **parts, slots=slots, runner=self.runner, strict=self.strict, keep_prefixes=True)
        return create_app(engine, tokenizer, self.settings)
