"""Tables and remarks of a measurement, for a terminal and as a JSON file.

The JSON file has the form of the experiments' result files, so `python -m benchmarks.report` of a checkout reads it. A
table is rows of plain values; X_low and X_high are the interval of X.
"""

from __future__ import annotations

import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import transformers
from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from draftree import __version__
from draftree.files import write_json
from draftree.runner.step_cost import chip_name

MADE = ("commit", "device", "dtype", "threads", "command")  # Facts in every row of a result file.


def now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Return the commit of the sources, with '+changes' if tracked files differ from it; None outside a clone."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # There is no git.
        return None


def describe(model: Any, name: str | None) -> dict[str, Any]:
    """Return commit, device, dtype, threads, command and versions for `model` called `name` (None: the embedded one).

    `model` None means that no model was run; the device is then the processor.
    """
    device = torch.device("cpu") if model is None else model.device
    return {
        "commit": commit(),
        "command": shlex.join(["draftree", *(_shown(argument) for argument in sys.argv[1:])]),
        "model": "no model" if model is None else _shown(name) if name else "embedded chat-4m",
        "device": chip_name(device),
        "device_type": device.type,
        "dtype": "" if model is None else str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "draftree": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
    }


def _shown(argument: str) -> str:
    """Return an argument with an absolute path shortened to its last part."""
    option, sign, value = argument.rpartition("=")  # Of --option=PATH, or NAME=PATH of --set and --drafter.
    return f"{option}{sign}{Path(value).name}" if value.startswith(("/", "~")) else argument


class Table(NamedTuple):
    """Rows of plain values, by column; `columns` are those shown, in order."""

    title: str
    rows: list[dict[str, Any]]
    columns: Sequence[str]
    caption: str = ""

    @property
    def filled(self) -> list[str]:
        """Return the shown columns that have a value in any row."""
        return [name for name in self.columns if any(row.get(name) is not None for row in self.rows)]

    def texts(self) -> list[list[str]]:
        """Return the headings, then a line for each row, with intervals in brackets; without empty columns."""
        names = self.filled
        lines = ([_cell(row, name) for name in names] for row in self.rows)
        return [[name.replace("_", " ") for name in names], *lines]

    def rich(self) -> RichTable:
        """Return the table for a terminal."""
        options: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
        options |= {"title": escape(self.title), "caption": escape(self.caption) or None}
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, **options)
        headings, *lines = self.texts()
        for name, heading in zip(self.filled, headings, strict=True):
            if any(isinstance(row.get(name), str) for row in self.rows):
                table.add_column(heading, no_wrap=name == "name")  # A name can be copied only unbroken.
            else:
                table.add_column(heading.replace(" ", "\n", 1), justify="right")
        for line in lines:
            table.add_row(*map(escape, line))
        return table


def number(value: Any) -> str:
    """Return the text of a value in tables: "" for None and NaN, three digits for small floats."""
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

    name: str  # Of its file, after "bench-".
    says: str  # A line about the first table.
    about: dict[str, Any]  # Commit, device, threads, dtype, command, model and more.
    tables: list[Table]  # The first has the rows of the JSON file.
    remarks: list[str]  # Lines below the tables.
    more: dict[str, Any]  # Further plain values for the JSON file.

    def printed(self) -> Iterator[Any]:
        """Yield the parts for a rich console."""
        for table in self.tables:
            yield table.rich()
        yield from map(escape, self.remarks)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; each row says where it was made."""
        first, *others = self.tables
        made = {fact: self.about[fact] for fact in MADE}
        return {
            "experiment": self.name,
            "source": "",
            "says": self.says,
            "complete": True,
            "about": self.about,
            "columns": list(first.columns),
            "rows": [row | made for row in first.rows],
            "remarks": self.remarks,
            "tables": {table.title: table.rows for table in others},
            "more": self.more,
        }

    def write(self, folder: Path) -> list[Path]:
        """Write bench-NAME.json into `folder`; return its path."""
        data = folder / f"bench-{self.name}.json"
        write_json(data, self.as_dict())
        return [data]
