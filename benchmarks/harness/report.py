"""What a run of an experiment leaves behind: a table on the terminal, a JSON file, a picture and a page.

The JSON file holds everything; `benchmarks.report` makes the tables of the documentation from such files. Every row
says where it was made, so that it can be quoted alone.
"""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from rich.text import Text

from benchmarks.harness.experiment import Experiment
from benchmarks.harness.plots import NAMING
from benchmarks.harness.tables import counted, records, rich_table, shown
from draftree.colours import colour_of, drafter_of
from draftree.files import replacing, write_json, write_text

MADE = ("commit", "device", "dtype", "threads", "command")


def swatch(column: str, cell: str) -> str | None:
    """The colour of the drafter that a cell names, as in all pictures; None for other cells."""
    return colour_of(cell) if column in NAMING and drafter_of(cell) else None


def partial_file(experiment: Experiment, folder: Path) -> Path:
    """Where the table so far of a run under way is kept."""
    return folder / f"bench-run-{experiment.name}.partial.json"


@dataclass(frozen=True)
class Report:
    """A run, finished or under way.

    Attributes:
        experiment: which.
        table: what it found; see `Experiment.run` for its `attrs`.
        about: commit, device, dtype, threads, command, versions, times, options.
        complete: whether the run is finished.
    """

    experiment: Experiment
    table: pd.DataFrame
    about: dict[str, Any]
    complete: bool = True

    @property
    def title(self) -> str:
        """Name and source."""
        return " - ".join(filter(None, [self.experiment.name, self.experiment.source]))

    @property
    def heading(self) -> str:
        """Where and how it was made, in a line."""
        about = self.about
        threads = f"{counted(about['threads'], 'thread')} of {about['device']}"
        where = ", ".join(filter(None, [about["model"], about["dtype"], threads]))
        prompts = f"; {about['prompts']} prompts of {len(about['sets'])} sets" if about.get("prompts") else ""
        return f"{where}{prompts}; commit {about['commit'] or 'unknown'}"

    @property
    def tables(self) -> dict[str, tuple[pd.DataFrame, tuple[str, ...]]]:
        """All tables by their titles, with the columns that are shown."""
        further = {name: (one, ()) for name, one in self.table.attrs.get("tables", {}).items()}
        return {self.experiment.says: (self.table, self.experiment.columns)} | further

    @property
    def remarks(self) -> list[str]:
        """Lines below the tables."""
        facts = list(self.table.attrs.get("remarks", ()))
        if "differing" in self.table.attrs:
            facts.append(f"Answers that differ from plain decoding's: {self.table.attrs['differing']}.")
        return facts

    def printed(self) -> Iterator[Any]:
        """For a rich console: the paper's figures first, under its model and device, then ours."""
        claim = self.experiment.claim
        if claim is not None:
            head = f"THE PAPER'S FIGURES ({self.experiment.source}): {claim.of}. {claim.model}; {claim.device}."
            yield Text(head, style="italic")
            if claim.rows:
                yield rich_table(claim.table(), "")
            if claim.words:
                yield Text(claim.words)
            yield Text("OUR FIGURES", style="italic")
        yield Text(self.heading)
        for name, (table, columns) in self.tables.items():
            yield rich_table(table, name, columns)
        for remark in self.remarks:
            yield Text(remark)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        made = {name: self.about[name] for name in MADE}
        attrs = self.table.attrs
        facts: dict[str, Any] = {
            "experiment": self.experiment.name,
            "source": self.experiment.source,
            "says": self.experiment.says,
            "complete": self.complete,
            "about": self.about,
            "columns": list(self.experiment.columns),
            "rows": [row | made for row in records(self.table)],
        }
        facts |= {"remarks": self.remarks} | {name: attrs[name] for name in ("differing", "more") if name in attrs}
        facts |= {"tables": {name: records(one) for name, one in attrs.get("tables", {}).items()}}
        return facts | ({"paper": asdict(self.experiment.claim)} if self.experiment.claim else {})

    def write(self, folder: Path) -> list[Path]:
        """Write bench-run-NAME.json, .png and .html into `folder`, and remove the partial file; returns the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"bench-run-{self.experiment.name}"
        data, picture, page = (stem.with_suffix(ending) for ending in (".json", ".png", ".html"))
        self.write_json(data)
        partial_file(self.experiment, folder).unlink(missing_ok=True)
        self.draw(picture)
        write_text(page, self.page(base64.b64encode(picture.read_bytes()).decode()))
        return [data, picture, page]

    def write_json(self, path: Path) -> None:
        """Write `as_dict` to `path`; a reader, and whoever comes after a kill, finds the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.as_dict())

    def draw(self, path: Path) -> None:
        """The picture, as PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        self.experiment.plot(figure, self.table)
        figure.suptitle(textwrap.fill(self.heading, int(14 * figure.get_figwidth())), fontsize=8, color="0.35")
        with replacing(path) as aside:
            figure.savefig(aside, dpi=120)

    def page(self, picture: str) -> str:
        """One HTML file: picture (base64), tables, remarks and examples; nothing is fetched, no script runs."""
        here = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
        return here.get_template("page.html.j2").render(
            title=self.title,
            says=self.experiment.says,
            about=self.about,
            heading=self.heading,
            picture=picture,
            tables={name: shown(table, columns) for name, (table, columns) in self.tables.items()},
            swatch=swatch,
            remarks=self.remarks,
            examples=self.table.attrs.get("examples", ()),
            claim=self.experiment.claim,
        )
