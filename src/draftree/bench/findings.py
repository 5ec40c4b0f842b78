"""What `bench speed` and `bench gpu` leave behind: tables on the terminal, a JSON file, a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape

from draftree.bench.files import MADE, write_json
from draftree.bench.pictures import has_matplotlib, new_figure, write_png
from draftree.bench.report import rich_table

Lines = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # a table's title, headings and lines


@dataclass(frozen=True, slots=True)
class Findings:
    """A finished measurement.

    Attributes:
        name: of its files, after "bench-".
        about: where and how it was made.
        rows: plain values, for JSON.
        tables: of texts, for a terminal.
        draw: puts the picture into a matplotlib figure.
        remarks: lines below the tables.
        more: further entries of the result file.
    """

    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    tables: list[Lines]
    draw: Callable[[Any], None]
    remarks: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """Where and how it was made, in a line."""
        about = self.about
        return (
            f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['device']}; {about['prompts']} "
            f"prompts of {len(about['sets'])} sets; commit {about['commit'] or 'unknown'}"
        )

    def printed(self) -> Iterator[Any]:
        """For a rich console."""
        yield escape(self.heading)
        for title, headings, lines in self.tables:
            yield rich_table(title, headings, lines)
        yield from map(escape, self.remarks)

    def write(self, folder: Path) -> list[Path]:
        """Write bench-NAME.json, every row saying where it was made, and with matplotlib .png, into `folder`."""
        made = {name: self.about[name] for name in MADE}
        facts = {"about": self.about, "rows": [row | made for row in self.rows]} | self.more
        written = [write_json(facts, folder / f"bench-{self.name}.json")]
        if has_matplotlib():
            figure = new_figure(13, 4.8)
            self.draw(figure)
            written.append(write_png(figure, folder / f"bench-{self.name}.png", self.heading))
        return written
