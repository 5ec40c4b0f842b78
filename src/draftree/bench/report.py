"""Tables of a measured case on the terminal, and the JSON file of a quick benchmark."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from draftree.bench.compare_case import Result
from draftree.bench.compare_methods import HUGGING_FACE, REFERENCE, WARM, label_of
from draftree.bench.summary import Estimate, shown

SHOWN_DIFFERENCES = 5
LONGEST_REASON = 90  # characters; the JSON file has the rest
METHOD_WIDTH = 26
MOST_DISTURBED = 0.02  # share of answers that may be slow before the report warns
SPEED_CAPTION = (
    "Total tokens / total time \\[95 % bootstrap over prompts]. Acceptance length: 1 + accepted / steps. Overhead "
    "efficiency: speed over (*) / acceptance length. Differing: prompts whose ids are not those of "
)


def render(result: Result) -> Group:
    """All tables, for a rich console."""
    tables = [_speed(result)]
    if WARM in result.rows and result.rows[WARM].by_set:
        tables.append(_by_set(result))
    return Group(*tables, *_remarks(result))


def _speed(result: Result) -> Table:
    about = result.about
    title = (
        f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['device']}: {about['prompts']} "
        f"prompts of {len(about['sets'])} sets, {about['settings']['rounds']} rounds; {about['case']}"
    )
    table = _table(title, f"{SPEED_CAPTION}{label_of(result.reference)}.")
    table.add_column("method", max_width=METHOD_WIDTH)
    for heading in (
        "tokens/s",
        "over\nHF generate",
        "over\nplain (*)",
        "acceptance\nlength",
        "overhead\nefficiency",
        "differing\nprompts",
    ):
        table.add_column(heading, justify="right")
    theirs = True
    for name in result.names:
        if theirs and name not in HUGGING_FACE:
            table.add_section()
            theirs = False
        named = f"{label_of(name)} (*)" if name == result.plain else label_of(name)
        if name not in result.rows:
            table.add_row(f"[dim]{named}[/dim]", "-")
            continue
        row = result.rows[name]
        efficiency = row.efficiency(result.plain)
        drafts = row.stats is not None and row.stats.drafted > 0
        table.add_row(
            named,
            _interval(row.speed, "{:.0f}"),
            _interval(row.over.get(REFERENCE), "{:.2f}"),
            _interval(row.over.get(result.plain), "{:.2f}"),
            f"{row.stats.acceptance_length:.2f}" if drafts and row.stats else "-",
            f"{efficiency:.2f}" if drafts and efficiency is not None else "-",
            "-" if name in result.uncompared else str(len(row.parted)),
            style="bold" if name == WARM else "",
        )
    return table


def _why(result: Result, name: str) -> str:
    why = result.unmeasured.get(name, "")
    return why if len(why) <= LONGEST_REASON else f"{why[: LONGEST_REASON - 1]}…"


def _table(title: str, caption: str | None) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
    )


def _by_set(result: Result) -> Table:
    table = _table(f"{label_of(WARM)}, by set", None)
    theirs = label_of(result.reference)
    table.add_column("set")
    for heading in ("tokens", f"{theirs}\ntokens/s", "warm\ntokens/s", f"over {theirs}", "acceptance\nlength"):
        table.add_column(heading, justify="right")
    for name, row in result.rows[WARM].by_set.items():
        table.add_row(
            name,
            str(row.tokens),
            f"{result.rows[result.reference].by_set[name].speed.value:.0f}",
            f"{row.speed.value:.0f}",
            _interval(row.over.get(result.reference), "{:.2f}"),
            f"{row.stats.acceptance_length:.2f}" if row.stats else "-",
        )
    return table


def _remarks(result: Result) -> list[str]:
    remarks = []
    memory = result.memory
    if memory and "why" in memory:
        remarks.append(f"Peak memory: not measured: {memory['why']}")
    elif memory:
        remarks.append(
            f"Peak memory at decoding length {memory['decoding_length']}: drafted "
            f"{memory['drafted_bytes'] / 2**20:.1f} MiB, plain {memory['plain_bytes'] / 2**20:.1f} MiB: "
            f"{100 * memory['overhead']:+.1f} %."
        )
    disturbed, compared = result.disturbed
    if disturbed > compared * MOST_DISTURBED:
        remarks.append(
            f"The machine was not quiet: {disturbed} of {compared} answers took over twice the time of the same answer "
            "in another round. Measure again before you trust these figures."
        )
    for name in result.names:
        if name in result.unmeasured:
            remarks.append(f"{label_of(name)}: not measured: {escape(_why(result, name))}")
    for name, note in result.notes.items():
        remarks.append(f"{label_of(name)}: {note}.")
    for name, row in result.rows.items():
        for task, where in row.parted[:SHOWN_DIFFERENCES]:
            remarks.append(f"{label_of(name)}, prompt {task.prompt.id}: {where}")
        if len(row.parted) > SHOWN_DIFFERENCES:
            remarks.append(f"{label_of(name)}: {len(row.parted) - SHOWN_DIFFERENCES} more differ, see the JSON file.")
    return remarks


def _interval(estimate: Estimate | None, number: str) -> str:
    return "-" if estimate is None else shown(estimate, number)


def write_json(result: Result, folder: Path) -> Path:
    """Write bench-quick.json into `folder`; returns its path."""
    path = folder / "bench-quick.json"
    path.write_text(json.dumps(result.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
