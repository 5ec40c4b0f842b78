"""What a measurement leaves behind for people: tables and remarks of cases, alike in every kind of file, and `Report`.

A `Report` is what `bench quick`, `speed` and `gpu` print and write; `files` writes those of `bench compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from draftree import files
from draftree.bench import pictures
from draftree.bench.case import Result
from draftree.bench.kit import REFERENCE, WARM, label_of
from draftree.bench.summary import shown
from draftree.engine.stats import STAGES

SHOWN_DIFFERENCES = 5  # of a method; the JSON file has all
LONGEST_REASON = 90  # characters; the JSON file has the rest
MOST_DISTURBED = 0.02  # share of answers that may be slow before a report warns
HEADINGS = (
    "method", "tokens/s", "over HF generate", "over plain", "acceptance length", "overhead efficiency", "differing",
)  # fmt: skip
CAPTION = (
    "Total tokens / total time [95 % bootstrap over prompts]. Acceptance length: 1 + accepted / steps. Overhead "
    "efficiency: speed over plain / acceptance length. Differing: prompts whose ids are not those of "
)


class Table(NamedTuple):
    """A table of texts, for every kind of file."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    caption: str = ""

    def rich(self) -> RichTable:
        """For a terminal, its first column on the left."""
        options: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
        options |= {"title": escape(self.title), "caption": escape(self.caption) or None}
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, **options)
        for place, heading in enumerate(self.headings):
            text = heading.replace(" ", "\n", 1) if place else heading
            table.add_column(text, justify="right" if place else "left")
        for line in self.lines:
            table.add_row(*map(escape, line))
        return table


@dataclass(frozen=True, slots=True)
class Report:
    """A finished measurement.

    Attributes:
        name: of its files, after "bench-".
        heading: where and how it was made, in a line.
        facts: plain values, for JSON.
        tables: for a terminal.
        remarks: lines below the tables.
        draw: puts the picture into a matplotlib figure.
    """

    name: str
    heading: str
    facts: dict[str, Any]
    tables: list[Table]
    remarks: list[str]
    draw: Callable[[Any], None]

    def printed(self) -> Iterator[Any]:
        """For a rich console."""
        for table in self.tables:
            yield table.rich()
        yield from map(escape, self.remarks)

    def write(self, folder: Path) -> list[Path]:
        """Write bench-NAME.json, and with matplotlib bench-NAME.png, into `folder`; returns their paths."""
        data, picture = (folder / f"bench-{self.name}.{ending}" for ending in ("json", "png"))
        write_json(self.facts, data)
        if not pictures.has_matplotlib():
            return [data]
        figure = pictures.new_figure()
        self.draw(figure)
        figure.suptitle(self.heading, fontsize=8, color="0.35", wrap=True)
        with files.replacing(picture) as aside:
            figure.savefig(aside, dpi=140)
        return [data, picture]


def write_json(facts: dict[str, Any], path: Path) -> Path:
    """Write plain values; returns the path."""
    files.write_json(path, facts)
    return path


def case_report(name: str, result: Result) -> Report:
    """What is said of a case: its table, of a warm trie its figures set by set, remarks, a picture."""
    tables = [case_table(result), *set_table(result)]
    draw = pictures.case_picture
    return Report(name, title(result), result.as_dict(), tables, remarks(result), lambda figure: draw(figure, result))


def title(result: Result) -> str:
    """What a case is of, in a line."""
    rounds = result.about["settings"].get("rounds", 1)
    return f"{heading(result.about)}, {rounds} {'round' if rounds == 1 else 'rounds'}; {result.about['case']}"


def heading(about: dict[str, Any]) -> str:
    """Where and how something was measured, in a line."""
    where = f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['device']}"
    return f"{where}: {about['prompts']} prompts of {len(about['sets'])} sets"


def case_table(result: Result) -> Table:
    """A line for each method."""
    lines = [cells(result, name) for name in result.names]
    return Table(title(result), HEADINGS, lines, f"{CAPTION}{label_of(result.reference)}.")


def cells(result: Result, name: str) -> list[str]:
    """A method's line under `HEADINGS`; its label alone where it was not measured."""
    label = f"{label_of(name)} (plain)" if name == result.plain else label_of(name)
    row = result.rows.get(name)
    if row is None:
        return [label, "not measured", *[""] * (len(HEADINGS) - 2)]
    efficiency, drafts = row.efficiency(result.plain), row.stats is not None and row.stats.drafted > 0
    over = [shown(row.over.get(name), "{:.2f}") for name in (REFERENCE, result.plain)]
    return [
        label,
        shown(row.speed, "{:.0f}"),
        *over,
        f"{row.stats.acceptance_length:.2f}" if drafts and row.stats else "",
        f"{efficiency:.2f}" if drafts and efficiency is not None else "",
        "" if name in result.uncompared else str(len(row.parted)),
    ]


def set_table(result: Result) -> list[Table]:
    """Figures of the warm trie by set; none where it was not measured, or prompts of all sets were mixed in batches."""
    if WARM not in result.rows or not result.rows[WARM].by_set:
        return []
    reference = label_of(result.reference)
    head = ("set", "tokens", f"{reference} tokens/s", "warm tokens/s", "over it", "acceptance length")
    lines = []
    for name, row in result.rows[WARM].by_set.items():
        length = f"{row.stats.acceptance_length:.2f}" if row.stats else ""
        plain = result.rows[result.reference].by_set[name].speed
        speeds = [f"{plain.value:.0f}", f"{row.speed.value:.0f}"]
        lines.append([name, str(row.tokens), *speeds, shown(row.over.get(result.reference), "{:.2f}"), length])
    return [Table(f"{label_of(WARM)}, by set", head, lines)]


def stage_table(label: str, result: Result) -> Table:
    """Microseconds a token by stage, of draftree's methods; `label` names the model."""
    lines = []
    for name, row in result.rows.items():
        if row.stats is not None:
            stages = [f"{1e6 * row.stats.seconds[stage] / row.tokens:.0f}" for stage in STAGES]
            lines.append([label_of(name), *stages])
    return Table(f"Microseconds a token by stage, {label}", ("method", *STAGES), lines)


def remarks(result: Result) -> list[str]:
    """Lines below the table: memory, disturbances, why methods are missing, where answers differ."""
    lines, memory = [], result.memory
    if memory and "why" in memory:
        lines.append(f"Peak memory: not measured: {memory['why']}")
    elif memory:
        lines.append(
            f"Peak memory at decoding length {memory['decoding_length']}: drafted "
            f"{memory['drafted_bytes'] / 2**20:.1f} MiB, plain {memory['plain_bytes'] / 2**20:.1f} MiB: "
            f"{100 * memory['overhead']:+.1f} %."
        )
    slow, compared = result.disturbed
    if slow > compared * MOST_DISTURBED:  # more than a quiet machine explains
        lines.append(
            f"The machine was not quiet: {slow} of {compared} answers took over twice the time of the same answer in "
            "another round. Measure again before you trust these figures."
        )
    for name in filter(result.unmeasured.__contains__, result.names):
        why = result.unmeasured[name]
        why = why if len(why) <= LONGEST_REASON else f"{why[: LONGEST_REASON - 1]}…"
        lines.append(f"{label_of(name)}: not measured: {why}")
    lines += [f"{label_of(name)}: {note}." for name, note in result.notes.items()]
    for name, row in result.rows.items():
        lines += [
            f"{label_of(name)}, prompt {task.prompt.id}: {where}" for task, where in row.parted[:SHOWN_DIFFERENCES]
        ]
        if len(row.parted) > SHOWN_DIFFERENCES:
            lines.append(f"{label_of(name)}: {len(row.parted) - SHOWN_DIFFERENCES} more differ, see the JSON file.")
    return lines
