"""Options of every verb that decodes: by which runner, and what may be done with the weights for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from draftree.cli.options import Runner


@dataclass(frozen=True)
class Running:
    """How passes are run."""

    runner: Runner = "auto"
    pack: Annotated[
        bool,
        typer.Option(
            "--pack/--no-pack",
            help="Reorder a large model's weights in place for the cpu runner; or leave them (slower).",
        ),
    ] = True
    strict: Annotated[bool, typer.Option("--strict", help="16-bit models: bit for bit plain decoding, or refused.")] = (
        False
    )

    def check(self) -> None:
        """Raise a ValueError for no such runner, and for one that copies weights where none may be copied."""
        from draftree.runner import check_choice

        check_choice(self.runner)
        if not self.pack and self.runner not in ("auto", "hooked", "in_place"):
            raise ValueError(
                f"--no-pack leaves the weights as they are, and --runner {self.runner} copies them: leave one out."
            )

    @property
    def name(self) -> str:
        """The runner, as an `Engine` takes it."""
        return "in_place" if self.runner == "auto" and not self.pack else self.runner

    def prepare(self, model: Any) -> None:
        """Pack the weights of a model that was loaded for this verb, where the runner would copy them."""
        from draftree.runner import pack_own

        pack_own(model, self.name)
