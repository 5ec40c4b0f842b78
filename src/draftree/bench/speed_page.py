"""What `bench speed` leaves behind: tables, rows for the result file, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from draftree.bench.analysis_setup import Findings, plain_axis
from draftree.bench.inflate_measure import HF, LABELS, LOOP
from draftree.bench.plot import BEST, THEIRS
from draftree.bench.speed_figures import Figure, case_table, differing, figure_table, step_table
from draftree.bench.speed_stages import PASS_PARTS, STEP_PARTS

if TYPE_CHECKING:
    from draftree.bench.speed import Measured

WIDEST = 3.0  # of what is wanted, that bars show
PART_NAMES = {
    "embed": "embed, and the call",
    "linear": "linear products",
    "between": "norms, angles, gating, sums",
    "verify": "verify (the pass)",
}


def findings_of(measured: Sequence[Measured]) -> Findings:
    """Rows, tables and picture of all models."""
    figures = [figure for one in measured for figure in one.figures]
    tables = [figure_table(figures, "Figures and what is wanted of them")]
    remarks, rows = [], [figure.as_dict() for figure in figures]
    for one in measured:
        tables += [step_table(one.label, one.steps.rows, one.steps.floor), case_table(one.label, one.case)]
        rows += [{"kind": "step", "model": one.label} | row for row in one.steps.rows]
        for row in one.stages:  # apart, for every row of a result file has a commit of its own
            seconds = {part: row[part] for part in (*STEP_PARTS, "whole")}
            told = {"kind": "stages", "model": one.label, "rows": row["rows"], "steps": row["steps"]}
            rows.append(told | {"seconds": seconds})
        if one.stages:
            tables.append(stage_table(one))
        if one.parts is not None:
            tables.append(part_table(one))
            rows += [{"kind": "pass", "model": one.label} | row for row in one.parts["passes"]]
        remarks += [f"{one.label}: runner {one.about['runner']}.", differing(one.label, one.case)]
        slow, compared = one.case.disturbed
        if compared and slow > 0.02 * compared:
            remarks.append(f"{one.label}: the machine was not quiet.")
    more = {
        "models": {
            one.label: {"about": one.about, "floor": one.steps.floor, "answers": one.case.as_dict()}
            | ({} if one.parts is None else {key: one.parts[key] for key in ("bandwidth", "peak", "context")})
            for one in measured
        }
    }

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 3)
        draw_wanted(axes[0], figures)
        _draw_steps(axes[1], measured)
        _draw_parts(axes[2], measured)

    return Findings(rows, tables, draw, (15, 4.8), more, remarks)


def stage_table(one: Measured) -> Table:
    """Where a step's time goes, by the engine's clock."""
    table = Table(
        "rows", "steps", *(PART_NAMES.get(part, part) for part in STEP_PARTS), "whole",
        title=f"Microseconds of a step by stage, {one.label}; in brackets the share", title_justify="left",
    )  # fmt: skip
    for row in one.stages:
        cells = [f"{1e6 * row[part]:.0f} ({row[part] / row['whole']:.1%})" for part in STEP_PARTS]
        table.add_row(str(row["rows"]), str(row["steps"]), *cells, f"{1e6 * row['whole']:.0f}")
    return table


def part_table(one: Measured) -> Table:
    """Where a pass's time goes, by timing its parts apart."""
    assert one.parts is not None
    table = Table(
        "rows", *(PART_NAMES.get(part, part) for part in PASS_PARTS), "whole",
        title=f"Microseconds of a pass by part, {one.label}; behind / what bytes or operations take at least",
        title_justify="left",
    )  # fmt: skip
    for row in one.parts["passes"]:
        cells = [
            f"{1e6 * row[part]:.0f}" + (f" / {1e6 * row['floors'][part]:.0f}" if part in row["floors"] else "")
            for part in PASS_PARTS
        ]
        table.add_row(str(row["rows"]), *cells, f"{1e6 * row['whole']:.0f}")
    table.caption = (
        f"{one.parts['bandwidth'] / 1e9:.1f} GB/s, {one.parts['peak'] / 1e9:.0f} billion operations a second, behind "
        f"{one.parts['context']} tokens"
    )
    table.caption_justify = "left"
    return table


def draw_wanted(axis: Any, figures: Sequence[Figure]) -> None:
    """How much of what is wanted each figure reaches, 1 and more where it does."""
    asked = [figure for figure in figures if figure.part_of_wanted is not None]
    parts = [min(figure.part_of_wanted or 0.0, WIDEST) for figure in asked]
    axis.barh(range(len(asked)), parts, color=[BEST if part >= 1 else "#c8793a" for part in parts], height=0.6)
    axis.axvline(1, color="0.25", linewidth=1)
    axis.set_yticks(range(len(asked)), [f"{figure.model}: {figure.name}" for figure in asked])
    axis.invert_yaxis()
    for y, (figure, part) in enumerate(zip(asked, parts, strict=True)):
        told = f" {figure.estimate.value:.2f} ({figure.sense} {figure.wanted:.3g})"
        axis.text(max(part, 1.02), y, told, va="center", fontsize=7)
    axis.set_xlim(0, 1.35 * max([*parts, 1.0]))
    plain_axis(axis, "Of what is wanted, reached", "1 and more: reached", "")


def _draw_steps(axis: Any, measured: Sequence[Measured]) -> None:
    for one, line in zip(measured, ("--", "-"), strict=False):
        for method, colour in ((HF, THEIRS), (LOOP, BEST)):
            held = [row for row in one.steps.rows if row["method"] == method]
            at = [row["rows"] for row in held]
            over = [row["over_one_row"] for row in held]
            axis.plot(at, over, line, marker="o", markersize=3, color=colour, label=f"{LABELS[method]}, {one.label}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(at, [str(rows) for rows in at])
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)
    plain_axis(axis, "A step over one of a single row", "rows of a step", "")


def _draw_parts(axis: Any, measured: Sequence[Measured]) -> None:
    """Shares of a step: the stages outside the pass, and the pass by its parts."""
    labels, shown = [], ("draft", "shape", *PASS_PARTS, "accept", "commit", "rest")
    left: list[float] = []
    stacks: dict[str, list[float]] = {part: [] for part in shown}
    for one in measured:
        inside = {} if one.parts is None else {row["rows"]: row for row in one.parts["passes"]}
        for row in one.stages:
            if row["rows"] not in inside:
                continue
            parts = inside[row["rows"]]
            scale = row["verify"] / parts["whole"] / row["whole"]
            labels.append(f"{one.label}, {row['rows']}")
            left.append(0.0)
            for part in shown:
                stacks[part].append(max(parts[part] * scale if part in PASS_PARTS else row[part] / row["whole"], 0.0))
    for number, part in enumerate(shown):
        axis.barh(labels, stacks[part], left=left, color=f"C{number}", label=part, height=0.6)
        left = [at + share for at, share in zip(left, stacks[part], strict=True)]
    axis.invert_yaxis()
    if labels:
        axis.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    plain_axis(axis, "Where a step's time goes (model, rows)", "", "")
