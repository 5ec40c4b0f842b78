"""What a run of an experiment leaves behind: a table on the terminal, a JSON file, a picture and a page.

The JSON file holds everything; `benchmarks.report` makes the tables of the documentation from such files. Every row
says where it was made, so that it can be quoted alone.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from rich.text import Text

from benchmarks.harness.comparisons import CLAIMED
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.plots import NAMING, png
from benchmarks.harness.tables import shown
from benchmarks.papers.claims import in_words
from draftree.bench import report
from draftree.files import replacing, write_json, write_text
from draftree.pages import colour_of, drafter_of


def swatch(column: str, cell: str) -> str | None:
    """Return the colour of the drafter that a cell names, as in all pictures; None for other cells."""
    return colour_of(cell) if column in NAMING and drafter_of(cell) else None


@dataclass(frozen=True)
class Report:
    """A finished run."""

    experiment: Experiment  # which
    table: pd.DataFrame  # what it found; see `Experiment.run` for its `attrs`
    about: dict[str, Any]  # commit, device, dtype, threads, command, versions, times, options

    @property
    def title(self) -> str:
        """Name and source."""
        return " - ".join(filter(None, [self.experiment.name, self.experiment.source]))

    @property
    def heading(self) -> str:
        """Return where and how it was made, in a line."""
        return heading(self.about)

    @property
    def tables(self) -> list[report.Table]:
        """Return the table and further ones."""
        first = shown(self.table, self.experiment.says, self.experiment.columns)
        return [first, *(shown(one, title) for title, one in self.table.attrs.get("tables", {}).items())]

    @property
    def said(self) -> list[report.Table]:
        """Return the tables as people read them: of the paper's claims the words, and its ratios beside ours."""
        return [in_words(table.rows) if table.title == CLAIMED else table for table in self.tables]

    @property
    def remarks(self) -> list[str]:
        """Return lines below the tables."""
        lines = list(self.table.attrs.get("remarks", ()))
        if "differing" in self.table.attrs:
            lines.append(f"Answers that differ from plain decoding's: {self.table.attrs['differing']}.")
        return lines

    def printed(self) -> Iterator[Any]:
        """Yield the parts for a rich console: the paper's figures with its model and device, then ours."""
        claim = self.experiment.claim
        if claim is not None:
            head = f"THE PAPER'S FIGURES ({self.experiment.source}): {claim.of}. {claim.model}; {claim.device}."
            yield Text(head, style="italic")
            if claim.rows:
                yield claim.table().rich()
            if claim.words:
                yield Text(claim.words)
            yield Text("OUR FIGURES", style="italic")
        yield Text(self.heading)
        for table in self.said:
            yield table.rich()
        for remark in self.remarks:
            yield Text(remark)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: what every result file has, and what is an experiment's own."""
        own, attrs = self.experiment, self.table.attrs
        of_all = report.Report(own.name, own.says, self.about, self.tables, self.remarks, attrs.get("more", {}))
        facts = of_all.as_dict() | {"source": own.source}
        facts |= {"differing": attrs["differing"]} if "differing" in attrs else {}
        return facts | ({"paper": asdict(own.claim)} if own.claim else {})

    def write(self, folder: Path) -> list[Path]:
        """Write bench-run-NAME.json, .png and .html into `folder`; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"bench-run-{self.experiment.name}"
        data, picture, page = (stem.with_suffix(ending) for ending in (".json", ".png", ".html"))
        write_json(data, self.as_dict())
        drawn = png(lambda figure: self.experiment.plot(figure, self.table), self.heading)
        with replacing(picture) as temporary:
            temporary.write_bytes(drawn)
        write_text(page, self.page(base64.b64encode(drawn).decode()))
        return [data, picture, page]

    def page(self, picture: str) -> str:
        """Return one HTML file: picture (base64), tables, remarks and examples; nothing is fetched, no script runs."""
        here = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
        return here.get_template("page.html.j2").render(report=self, picture=picture, swatch=swatch)


def heading(about: dict[str, Any]) -> str:
    """Return where and how something was measured, in a line."""
    threads = f"{counted(about['threads'], 'thread')} of {about['device']}"
    where = ", ".join(filter(None, [about["model"], about["dtype"], threads]))
    prompts = ""
    if about.get("prompts"):
        prompts = f": {counted(about['prompts'], 'prompt')} of {counted(len(about['sets']), 'set')}"
    return f"{where}{prompts}; commit {about['commit'] or 'unknown'}"


def counted(number: int, noun: str) -> str:
    """Return a text such as "1 thread" or "2 threads"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
