"""Figures as the papers print them, from the files `papers/*.toml`, for the tables that are set against them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draftree.bench.report import Table

PAPERS = Path(__file__).parents[1] / "papers"


@dataclass(frozen=True, slots=True)
class Claim:
    """Figures as a paper prints them, with the model and the device that they were measured on."""

    # model, device: of the paper; where they differ by row, the rows say it.
    model: str
    device: str
    of: str  # what the figures are, with their unit
    columns: Sequence[str] = ()  # headings; the first one names the rows
    rows: Sequence[Sequence[str]] = ()  # cells as printed
    words: str = ""  # what the paper says in its text, where a figure prints no numbers

    def cell(self, row: str, column: str) -> str:
        """Return one figure; "" if the paper has none."""
        place = self.columns.index(column)
        return next((cells[place] for cells in self.rows if cells[0] == row), "")

    def table(self) -> Table:
        """Return the rows under their headings."""
        return Table("", [dict(zip(self.columns, row, strict=True)) for row in self.rows], self.columns)


@cache
def claims_of(paper: str) -> dict[str, Claim]:
    """Return the figures of a paper such as "Hidden Transfer", by item such as "Table 4"."""
    held = tomllib.loads((PAPERS / f"{paper.lower().replace(' ', '_')}.toml").read_text(encoding="utf-8"))
    shared = {name: held.pop(name) for name in ("model", "device")}
    return {item: Claim(**shared | facts) for item, facts in held.items()}
