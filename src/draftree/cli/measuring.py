"""What every measurement of `draftree bench` begins with: its prompts, and a folder for its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftree.cli.options import RESULTS, Prompts, Results, check_folder

if TYPE_CHECKING:
    from draftree.prompts import Prompt


@dataclass(frozen=True)
class Measuring:
    """Options of every measurement that answers prompts."""

    prompts: Prompts = None
    out: Results = RESULTS

    def begin(self) -> list[Prompt]:
        """The prompts, once the folder is there; a ValueError for a file or folder that cannot be used."""
        from draftree.prompts import embedded_prompts, read_prompts

        found = embedded_prompts() if self.prompts is None else read_prompts(self.prompts)
        check_folder(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        return found
