"""Pictures of what was measured, by matplotlib, which comes with the extra `bench`; without it there are
none."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle
from typing import Any

from draftree.bench.case import Result
from draftree.bench.names import HUGGING_FACE, RUNNERS, label_of
from draftree.colours import PLAIN, THEIRS, colour_of
from draftree.engine.stats import STAGES

MOST_SERIES = 5  # methods in pictures with a colour for each
MARKERS = "osD^vPX*<>"  # as methods of the same drafter have the same colour


def png(draw: Callable[[Any], None], caption: str = "") -> bytes | None:
    """What `draw` puts into a matplotlib figure, `caption` above it; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure, out = Figure(layout="constrained"), io.BytesIO()
    FigureCanvasAgg(figure)
    with rc_context({"text.parse_math": False}):  # names of sets and models may have dollar signs
        draw(figure)
        if caption:
            written = caption.replace("$", r"\$")  # lines are broken as if there were mathematics all the same
            figure.suptitle(written, fontsize=8, color="0.35", wrap=True, parse_math=True)
        figure.savefig(out, dpi=120)
    return out.getvalue()


def case_picture(figure: Any, result: Result) -> None:
    """Speeds, speed-up by set, time by stage and acceptance by depth of a case."""
    figure.set_size_inches(13, 2.8 + 0.5 * len(result.rows))
    for axis, draw in zip(figure.subplots(2, 2).flatten(), (_speeds, _by_set, _stages, _depths), strict=True):
        draw(axis, result)


def _speeds(axis: Any, result: Result) -> None:
    rows = {name: result.rows[name] for name in result.names if name in result.rows}
    best = max(rows, key=lambda name: rows[name].speed.value)
    colours = [method_colour(name) for name in rows]
    values = [row.speed.value for row in rows.values()]
    lows, highs = zip(*(row.speed.ends for row in rows.values()), strict=True)
    axis.barh(range(len(rows)), values, color=colours, height=0.68)
    axis.hlines(range(len(rows)), lows, highs, color="0.25", linewidth=1)
    for y, (name, value, high) in enumerate(zip(rows, values, highs, strict=True)):
        weight = "bold" if name == best else "normal"
        axis.text(high + 0.012 * max(highs), y, f"{value:.0f}", va="center", fontsize=8, weight=weight)
    axis.set_yticks(range(len(rows)), [label_of(name) for name in rows])
    axis.set_xlim(0, max(highs) * 1.12)
    axis.invert_yaxis()
    plain_axis(axis, "Tokens a second (light grey: Hugging Face, dark grey: plain)", "", "")


def method_colour(name: str) -> str:
    """Its drafter's, or a grey where draftree does not draft."""
    return THEIRS if name in HUGGING_FACE else PLAIN if name in RUNNERS else colour_of(name)


def _looks(result: Result) -> list[tuple[str, dict[str, Any]]]:
    """Measured drafters and how they are drawn: fastest first, without the worst case, which accepts nothing."""
    names = [n for n, row in result.rows.items() if row.stats is not None and row.stats.accepted]
    names.sort(key=lambda name: -result.rows[name].speed.value)
    return [
        (name, {"color": method_colour(name), "marker": marker, "label": label_of(name)})
        for name, marker in zip(names, cycle(MARKERS), strict=False)
    ]


def _by_set(axis: Any, result: Result) -> None:
    """What drafting gains: over plain decoding, as the loop's own gain over HF generate is no drafter's."""
    plain = result.baselines.plain
    for name, look in _looks(result)[:MOST_SERIES] if plain in result.rows else ():
        held = result.rows[name].by_set
        axis.plot([row.over[plain].value for row in held.values()], list(held), linestyle="", **look)
    axis.axvline(1, color=THEIRS, linewidth=1.5)
    measured = label_of(plain) if plain in result.rows else "plain decoding, which was not measured"
    plain_axis(axis, "Speed-up by task", f"times {measured}", "")


def _stages(axis: Any, result: Result) -> None:
    rows = {label_of(name): row for name, row in result.rows.items() if row.stats is not None and row.tokens}
    left = [0.0] * len(rows)
    for stage in (*STAGES, "between"):
        parts = []
        for row in rows.values():
            assert row.stats is not None
            seconds = row.seconds - row.stats.total_seconds if stage == "between" else row.stats.seconds[stage]
            parts.append(1000 * max(seconds, 0.0) / row.tokens)
        axis.barh(list(rows), parts, left=left, height=0.66, label=stage)
        left = [at + part for at, part in zip(left, parts, strict=True)]
    axis.invert_yaxis()
    plain_axis(axis, "Time by stage", "milliseconds a token; prompts are read in verify", "")


def _depths(axis: Any, result: Result) -> None:
    for name, look in _looks(result):
        stats = result.rows[name].stats
        assert stats is not None
        shares = [hits / stats.steps for hits in stats.accepted_by_depth]
        axis.plot(range(1, len(shares) + 1), shares, markersize=3, **look)
    plain_axis(axis, "Acceptance by depth", "depth", "share of steps")


def plain_axis(axis: Any, title: str, x: str, y: str) -> None:
    """Labels and lines of one panel, alike in all pictures."""
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=7)
