"""What `bench gpu` leaves behind: tables, rows for the result file, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from draftree.bench.analysis_setup import Findings, plain_axis
from draftree.bench.compare_case import Result
from draftree.bench.inflate_measure import FORM_LABELS, HF, LABELS, LOOP
from draftree.bench.plot import BEST, THEIRS
from draftree.bench.speed_figures import case_table, differing, figure_table, figures_of, step_table
from draftree.bench.speed_page import draw_wanted
from draftree.bench.speed_steps import Steps
from draftree.runner.step_cost import StepCost


def findings_of(
    label: str, form: str, steps: Steps, case: Result, cost: StepCost, chosen: Sequence[dict[str, Any]]
) -> Findings:
    """Rows, tables and picture.

    Args:
        label: of the model.
        form: of the runner.
        steps, case, cost: what was measured.
        chosen: of `gpu.choices`.
    """
    figures = figures_of("gpu", label, steps.rows, steps.floor, case)
    table = Table(
        "batch", "guesses a request", "tokens a request and step", "milliseconds of a step", "expected speed-up",
        title="What the planner would choose, by the curve and the warm trie's acceptance by depth",
        title_justify="left",
    )  # fmt: skip
    for row in chosen:
        table.add_row(
            str(row["batch"]), f"{row['guesses']:.1f}", f"{row['tokens']:.2f}", f"{1000 * row['seconds']:.2f}",
            f"{row['speed_up']:.2f}",
        )  # fmt: skip
    curve = [{"rows": int(n), "seconds": float(s)} for n, s in zip(cost.rows, cost.seconds, strict=True)]
    rows = [figure.as_dict() for figure in figures] + [{"kind": "step"} | row for row in steps.rows]
    rows += [{"kind": "curve"} | point for point in curve] + [{"kind": "choice"} | row for row in chosen]

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2)
        draw_wanted(axes[0], figures)
        colours = {HF: THEIRS, LOOP: BEST} | dict(zip(FORM_LABELS, ("0.6", "tab:cyan"), strict=True))
        for method, colour in colours.items():
            held = [row for row in steps.rows if row["method"] == method]
            times = [1000 * row["seconds"] for row in held]
            at = [row["rows"] for row in held]
            if held:
                axes[1].plot(at, times, "o-", color=colour, label=LABELS[method])
        axes[1].axhline(1000 * steps.floor["seconds"], color="0.25", linestyle=":", label="weights read once")
        axes[1].set_xscale("log", base=2)
        counts = sorted({row["rows"] for row in steps.rows})
        axes[1].set_xticks(counts, [str(n) for n in counts])
        axes[1].set_ylim(bottom=0)
        axes[1].legend(frameon=False, fontsize=8)
        plain_axis(axes[1], "A step", "rows of a step", "milliseconds")

    tables = [
        figure_table(figures, "Figures and what is wanted of them"), step_table(label, steps.rows, steps.floor),
        case_table(label, case), table,
    ]  # fmt: skip
    more = {"floor": steps.floor, "answers": case.as_dict()}
    return Findings(rows, tables, draw, (12, 4.4), more, [f"Runner: {form}.", differing(label, case)])
