"""Pictures of what was measured, by matplotlib, which comes with the extra `bench`; without it there are
none."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from draftree.bench.case import Result
from draftree.bench.names import HUGGING_FACE, label_of
from draftree.engine.stats import STAGES

OURS, THEIRS, BEST = "#7aa874", "#9aa5b1", "#2f7d32"
MOST_SERIES = 5  # methods in pictures with a colour for each


def png(draw: Callable[[Any], None], caption: str = "") -> bytes | None:
    """What `draw` puts into a matplotlib figure, `caption` above it; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure, out = Figure(layout="constrained"), io.BytesIO()
    FigureCanvasAgg(figure)
    draw(figure)
    if caption:
        figure.suptitle(caption, fontsize=8, color="0.35", wrap=True)
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
    colours = [THEIRS if name in HUGGING_FACE else BEST if name == best else OURS for name in rows]
    values = [row.speed.value for row in rows.values()]
    lows, highs = zip(*(row.speed.ends for row in rows.values()), strict=True)
    axis.barh(range(len(rows)), values, color=colours, height=0.68)
    axis.hlines(range(len(rows)), lows, highs, color="0.25", linewidth=1)
    for y, (value, high) in enumerate(zip(values, highs, strict=True)):
        axis.text(high + 0.012 * max(highs), y, f"{value:.0f}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [label_of(name) for name in rows])
    axis.set_xlim(0, max(highs) * 1.12)
    axis.invert_yaxis()
    plain_axis(axis, "Tokens a second (grey: Hugging Face)", "", "")


def _drafting(result: Result) -> list[str]:
    """Measured drafters, fastest first, without the worst case, which accepts nothing."""
    names = [n for n, row in result.rows.items() if row.stats is not None and row.stats.accepted]
    return sorted(names, key=lambda name: -result.rows[name].speed.value)


def _by_set(axis: Any, result: Result) -> None:
    """What drafting gains: over plain decoding, as the loop's own gain over HF generate is no drafter's."""
    plain = result.baselines.plain
    for name in _drafting(result)[:MOST_SERIES] if plain in result.rows else ():
        held = result.rows[name].by_set
        axis.plot([row.over[plain].value for row in held.values()], list(held), "o", label=label_of(name))
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
    for name in _drafting(result):
        stats = result.rows[name].stats
        assert stats is not None
        shares = [hits / stats.steps for hits in stats.accepted_by_depth]
        axis.plot(range(1, len(shares) + 1), shares, "o-", markersize=3, label=label_of(name))
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
