"""What a measurement leaves behind: tables and remarks on a terminal, a JSON file, and with matplotlib a picture.

The JSON file has the form of the experiments' result files, so that `python -m benchmarks.report` of a checkout takes
it as well. A table is rows of plain values; X_low and X_high are the interval of X.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from draftree.bench.machine import MADE
from draftree.bench.pictures import png
from draftree.files import replacing, write_json


class Table(NamedTuple):
    """Rows of plain values."""

    title: str  # above the table
    rows: list[dict[str, Any]]  # column names to values; a row may have others than those that are shown
    columns: Sequence[str]  # what people are shown, in order
    caption: str = ""  # below the table

    @property
    def filled(self) -> list[str]:
        """The columns in which any row has a value."""
        return [name for name in self.columns if any(row.get(name) is not None for row in self.rows)]

    def texts(self) -> list[list[str]]:
        """Headings, then a line for each row, intervals in brackets; columns without any value are left out."""
        names = self.filled
        lines = ([_cell(row, name) for name in names] for row in self.rows)
        return [[name.replace("_", " ") for name in names], *lines]

    def rich(self, bold: int | None = None) -> RichTable:
        """For a terminal, words on the left and numbers on the right, row `bold` in bold."""
        options: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
        options |= {"title": escape(self.title), "caption": escape(self.caption) or None}
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, **options)
        headings, *lines = self.texts()
        for name, heading in zip(self.filled, headings, strict=True):
            if any(isinstance(row.get(name), str) for row in self.rows):
                table.add_column(heading, no_wrap=name == "name")  # what a name is called elsewhere is whole
            else:
                table.add_column(heading.replace(" ", "\n", 1), justify="right")
        for number, line in enumerate(lines):
            table.add_row(*map(escape, line), style="bold" if number == bold else "")
        return table

    def markdown(self) -> list[str]:
        """Lines of a Markdown table."""
        headings, *lines = self.texts()
        under = f"|{'---|' * len(headings)}"
        return [f"| {' | '.join(headings)} |", under, *(f"| {' | '.join(line)} |" for line in lines)]


def number(value: Any) -> str:
    """A value as tables show it; nothing for None and for what is not a number."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if isinstance(value, int):
        return str(value)
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _cell(row: dict[str, Any], name: str) -> str:
    low, high = (row.get(f"{name}_{end}") for end in ("low", "high"))
    return number(row.get(name)) + ("" if low is None else f" [{number(low)}, {number(high)}]")


@dataclass(frozen=True, slots=True)
class Report:
    """A finished measurement."""

    name: str  # of its files, after "bench-"
    says: str  # what the first table shows, in a line
    about: dict[str, Any]  # commit, device, threads, dtype, command, model and more
    tables: list[Table]  # the first has the rows of the JSON file
    remarks: list[str]  # lines below the tables
    more: dict[str, Any]  # further plain values for the JSON file
    draw: Callable[[Any], None] | None = None  # puts the picture into a matplotlib figure; None where there is none
    verdicts: Sequence[str] = ()  # what it comes to, in two sentences for each case; above the tables

    def printed(self) -> Iterator[Any]:
        """For a rich console."""
        yield from (Text(verdict, style="bold") for verdict in self.verdicts)
        for table in self.tables:
            yield table.rich()
        yield from map(escape, self.remarks)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; every row says where it was made."""
        first, *others = self.tables
        made = {fact: self.about[fact] for fact in MADE}
        return {
            "experiment": self.name,
            "source": "",
            "says": self.says,
            "complete": True,
            "verdicts": list(self.verdicts),
            "about": self.about,
            "columns": list(first.columns),
            "rows": [row | made for row in first.rows],
            "remarks": self.remarks,
            "tables": {table.title: table.rows for table in others},
            "more": self.more,
        }

    def write(self, folder: Path) -> list[Path]:
        """Write bench-NAME.json, and with matplotlib bench-NAME.png, into `folder`; returns their paths."""
        data = folder / f"bench-{self.name}.json"
        write_json(data, self.as_dict())
        picture = None if self.draw is None else png(self.draw, heading(self.about))
        if picture is None:
            return [data]
        with replacing(data.with_suffix(".png")) as temporary:
            temporary.write_bytes(picture)
        return [data, data.with_suffix(".png")]


def heading(about: dict[str, Any]) -> str:
    """Where and how something was measured, in a line."""
    threads = f"{counted(about['threads'], 'thread')} of {about['device']}"
    where = ", ".join(filter(None, [about["model"], about["dtype"], threads]))
    prompts = f": {about['prompts']} prompts of {len(about['sets'])} sets" if about.get("prompts") else ""
    return f"{where}{prompts}; commit {about['commit'] or 'unknown'}"


def counted(number: int, noun: str) -> str:
    """Such as "1 thread" and "2 threads"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
