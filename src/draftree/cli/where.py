"""Options of every verb that loads a model: on which device, in which type, with how many threads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from draftree.cli.options import Threads, use_threads
from draftree.models import Placement


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
        str | None, typer.Option(help="int8: keep the layers' weights in 8 bits, by torchao.", show_default="no")
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
