"""What a paper prints in a table, with the model and the device it was measured on, to stand beside our own figures.

A paper's figures are of other models, texts and devices. They are shown so that the order and size of effects can be
compared, under a heading that leaves no doubt whose they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Claim:
    """Figures as a paper prints them.

    Attributes:
        model, device: what they were measured on; where they differ by row, the rows say it.
        of: what the figures are, with their unit.
        columns: headings; the first one names the rows.
        rows: cells as printed.
        words: what the paper says in its text, where a figure has no numbers in it.
    """

    model: str
    device: str
    of: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    words: str = ""

    def cell(self, row: str, column: str) -> str:
        """One figure; empty where the paper has none."""
        place = self.columns.index(column)
        return next((cells[place] for cells in self.rows if cells[0] == row), "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def shown(self, name: str) -> Group:
        """For a console, under a line with `name` ("Lookahead, Table 3"), model and device."""
        head = Text(f"THE PAPER'S FIGURES ({name}): {self.of}. {self.model}; {self.device}.", style="italic")
        if not self.rows:
            return Group(head, Text(self.words))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=self.words or None, caption_justify="left")
        for place, heading in enumerate(self.columns):
            table.add_column(heading, justify="right" if place else "left")
        for cells in self.rows:
            table.add_row(*cells)
        return Group(head, table)
