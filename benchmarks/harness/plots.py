"""Pictures of tables: bars, lines and points with intervals, made once for all experiments.

Each function returns what draws a table into a matplotlib figure; names of columns say what is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftree.pages import COLOURS, PLAIN, THEIRS, colour_of, drafter_of

NAMING = ("drafter", "drafters", "way", "method")  # columns that may name a drafter
Plot = Callable[[Any, pd.DataFrame], None]
MARKERS = "osD^vPX*<>"  # as methods of the same drafter have the same colour


def bars(*values: str, label: str | Sequence[str], mark: float | None = 1.0) -> Plot:
    """Return a plot of horizontal bars, one for each row, a panel for each of `values`; `mark` is a vertical line."""
    return partial(_draw_rows, values=values, label=label, mark=mark, dots=False)


def points(value: str, label: str | Sequence[str]) -> Plot:
    """Return a plot of points with their intervals, one for each row."""
    return partial(_draw_rows, values=(value,), label=label, mark=1.0, dots=True)


def _draw_rows(
    figure: Any, table: pd.DataFrame, *, values: Sequence[str], label: Any, mark: float | None, dots: bool
) -> None:
    """Draw the rows one below the other, with their names on the left."""
    figure.set_size_inches(5 * len(values) + 2, 1.4 + 0.3 * len(table))
    for axis, value in zip(_panels(figure, len(values), sharey=True), values, strict=True):
        at, reach = np.arange(len(table)), _reach(table, value)
        if dots:
            for i, colour in enumerate(colours(table)):
                own = None if reach is None else reach[:, i : i + 1]
                axis.errorbar(table[value].iloc[i], i, xerr=own, fmt="o", color=colour)
        else:
            axis.barh(at, table[value], xerr=reach, color=colours(table), height=0.66, ecolor="0.3")
        axis.set_yticks(at, labels(table, label))
        axis.set_ylim(len(table) - 0.4, -0.6)
        if mark is not None:
            axis.axvline(mark, color="0.5", linewidth=0.8)
        plain_axis(axis, "", value.replace("_", " "), "")


def lines(x: str, *values: str, by: str | Sequence[str] = (), panel: str | None = None, log: bool = False) -> Plot:
    """Return a plot of lines over `x`, one for each `by`, in panels by `values` or by the column `panel`."""

    def draw(figure: Any, table: pd.DataFrame) -> None:
        parts = [(value, value, table) for value in values]
        if panel is not None:
            parts = [
                (name if isinstance(name, str) else f"{panel} {name}", values[0], own)
                for name, own in table.groupby(panel, sort=False)
            ]
        figure.set_size_inches(4.6 * len(parts) + 1, 4.2)
        for axis, (title, value, own) in zip(_panels(figure, len(parts)), parts, strict=True):
            drawn = own.assign(_by=labels(own, by)).groupby("_by", sort=False)
            for (name, line), marker in zip(drawn, cycle(MARKERS), strict=False):
                at, look = line[x].astype(float), {"marker": marker}
                if panel != "drafter" and (own_colour := _common(colours(line, None))):
                    look["color"] = own_colour
                if at.notna().any():
                    axis.errorbar(at, line[value], yerr=_reach(line, value), label=str(name) or None, **look)
            if log:
                axis.set_xscale("log", base=2)
            plain_axis(axis, *(name.replace("_", " ") for name in (title, x, value if panel else "")))

    return draw


def colours(table: pd.DataFrame, other: str | None = PLAIN) -> list[str | None]:
    """Return a colour for each row: that of the drafter that it names; `other` where it names none."""
    held = [name for name in NAMING if name in table]
    found = ([str(row[name]) for name in held] for _, row in table.iterrows())
    return [next((colour_of(name) for name in names if drafter_of(name)), other) for names in found]


def _common(found: Sequence[str | None]) -> str | None:
    """Return the one colour of all rows; None if they have several, or are all of merged drafters."""
    return found[0] if len(set(found)) == 1 and found[0] != COLOURS["several"] else None


def labels(table: pd.DataFrame, names: str | Sequence[str]) -> list[str]:
    """Return a text for each row: what stands in these columns."""
    held = [names] if isinstance(names, str) else [name for name in names if name in table]
    return [", ".join(str(row[name]) for name in held if pd.notna(row[name])) for _, row in table.iterrows()]


def _reach(table: pd.DataFrame, value: str) -> np.ndarray | None:
    """Return both sides of the interval, as matplotlib takes them."""
    if f"{value}_low" not in table:
        return None
    reach = np.array([table[value] - table[f"{value}_low"], table[f"{value}_high"] - table[value]], float)
    return np.nan_to_num(reach).clip(min=0)


def _panels(figure: Any, count: int, **options: Any) -> Any:
    return figure.subplots(1, max(count, 1), squeeze=False, **options)[0]


def png(draw: Callable[[Any], None], caption: str = "") -> bytes:
    """Return the picture that `draw` makes in a matplotlib figure, `caption` above it."""
    figure, out = Figure(layout="constrained"), io.BytesIO()
    FigureCanvasAgg(figure)
    with rc_context({"text.parse_math": False}):  # names of sets and models may have dollar signs
        draw(figure)
        if caption:
            written = caption.replace("$", r"\$")  # lines are broken as if there were mathematics all the same
            figure.suptitle(written, fontsize=8, color="0.35", wrap=True, parse_math=True)
        figure.savefig(out, dpi=120)
    return out.getvalue()


def method_colour(name: str) -> str:
    """Return the colour of a method's drafter, or a grey for plain decoding and Hugging Face."""
    return THEIRS if name.startswith("hf-") else PLAIN if name.startswith("draftree") else colour_of(name)


def plain_axis(axis: Any, title: str, x: str, y: str) -> None:
    """Draw the labels and lines of one panel, alike in all pictures."""
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=7)
