"""A measured case as people read it: the cells of its table, and what else there is to say, for every kind of file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from draftree.bench.case import Result
from draftree.bench.kit import REFERENCE, WARM, label_of
from draftree.bench.summary import shown

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


def title(result: Result) -> str:
    """What a case is of, in a line."""
    about = result.about
    rounds = about["settings"]["rounds"]
    where = f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['device']}"
    measured = (
        f"{about['prompts']} prompts of {len(about['sets'])} sets, {rounds} {'round' if rounds == 1 else 'rounds'}"
    )
    return f"{where}: {measured}; {about['case']}"


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


def is_disturbed(result: Result) -> bool:
    """Whether more answers were slow in one round alone than a quiet machine explains."""
    slow, compared = result.disturbed
    return slow > compared * MOST_DISTURBED


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
    if is_disturbed(result):
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


def render(result: Result) -> Group:
    """All of it for a rich console; of a warm trie its figures set by set as well."""
    caption = f"{CAPTION}{label_of(result.reference)}."
    tables = [rich_table(title(result), HEADINGS, [cells(result, name) for name in result.names], caption)]
    if WARM in result.rows and result.rows[WARM].by_set:
        reference = label_of(result.reference)
        head = ("set", "tokens", f"{reference} tokens/s", "warm tokens/s", "over it", "acceptance length")
        lines = []
        for name, row in result.rows[WARM].by_set.items():
            length = f"{row.stats.acceptance_length:.2f}" if row.stats else ""
            plain = result.rows[result.reference].by_set[name].speed
            speeds = [f"{plain.value:.0f}", f"{row.speed.value:.0f}"]
            lines.append([name, str(row.tokens), *speeds, shown(row.over.get(result.reference), "{:.2f}"), length])
        tables.append(rich_table(f"{label_of(WARM)}, by set", head, lines))
    return Group(*tables, *map(escape, remarks(result)))


def rich_table(name: str, headings: Sequence[str], lines: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table of texts, its first column on the left."""
    options: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=escape(name), caption=escape(caption) or None, **options)
    for place, heading in enumerate(headings):
        table.add_column(heading.replace(" ", "\n", 1) if place else heading, justify="right" if place else "left")
    for line in lines:
        table.add_row(*map(escape, line))
    return table
