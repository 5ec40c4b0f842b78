"""What `draftree bench inflate` leaves behind: a table, a JSON file, and a picture."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table

from draftree.bench.inflate_measure import HF, LABELS, LOOP, ROWS, InflateResult
from draftree.bench.plot import BEST, DOTS_PER_INCH, THEIRS, has_matplotlib

NAME = "bench-inflate"


def render(result: InflateResult) -> Group:
    """The table and what else there is to say, for a rich console."""
    about, floor = result.about, result.floor
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"Milliseconds of a step behind {about['settings']['context']} tokens",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("rows", justify="right")
    for name in (HF, LOOP):
        table.add_column(LABELS[name], justify="right")
    table.add_column("HF / draftree", justify="right")
    held = {(row["method"], row["rows"]): row for row in result.rows}
    for rows in ROWS:
        theirs, ours = held[HF, rows], held[LOOP, rows]
        cells = [f"{1000 * r['seconds']:.1f} ({r['over_one_row']:.2f})" for r in (theirs, ours)]
        table.add_row(str(rows), *cells, f"{theirs['seconds'] / ours['seconds']:.2f}")
    shares = [f"{LABELS[name]} {held[name, 1]['floor_share']:.2f}" for name in (HF, LOOP)]
    lines = [
        f"In brackets: over one row. Medians of {about['settings']['rounds']} rounds, {about['clock']}.",
        f"Floor: {floor['weight_bytes'] / 1e9:.2f} GB of weights at {floor['bandwidth'] / 1e9:.1f} GB/s take "
        f"{1000 * floor['seconds']:.1f} ms; over a step of one row: {', '.join(shares)}.",
        f"Runner: {about['runner']}.",
        _equality(result),
    ]
    return Group(f"{heading(result)}.", table, *lines)


def heading(result: InflateResult) -> str:
    """Where and how a result was made, in a line."""
    about, size = result.about, result.about["size"]
    return (
        f"{about['model']} ({size['parameters'] / 1e6:.0f}M: {size['layers']} layers of {size['hidden_size']}), "
        f"{about['dtype']}, {about['threads']} threads of {about['device']}"
    )


def _equality(result: InflateResult) -> str:
    held = result.equality
    told = (
        f"Against the small model, {held['prompts']} prompts: logits differ by {held['logits']:.2g} at most (their "
        f"deviation is {held['spread']:.2g})"
    )
    if not held["differing"]:
        return f"{told}, all {held['tokens']} greedy tokens are equal."
    first = held["differing"][0]
    return f"{told}, {len(held['differing'])} answers differ, prompt {first['prompt']}: {first['where']}."


def write_json(result: InflateResult, folder: Path) -> Path:
    """Write bench-inflate.json into `folder`; returns its path."""
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps(result.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def write_png(result: InflateResult, folder: Path) -> Path:
    """Draw bench-inflate.png into `folder`; returns its path.

    Raises:
        ValueError: matplotlib is missing.
    """
    if not has_matplotlib():
        raise ValueError("The plot needs matplotlib: pip install 'draftree[bench]'.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, colour in ((HF, THEIRS), (LOOP, BEST)):
        held = [row for row in result.rows if row["method"] == name]
        places = [row["rows"] for row in held]
        axis.plot(places, [1000 * row["seconds"] for row in held], "o-", color=colour, label=LABELS[name])
    axis.axhline(1000 * result.floor["seconds"], color="0.25", linestyle=":", label="weights read once")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows of a step")
    axis.set_ylabel("milliseconds")
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    figure.suptitle(f"{heading(result)}; commit {result.about['commit'] or 'unknown'}", fontsize=8, color="0.35")
    path = folder / f"{NAME}.png"
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path
