"""The picture of a quick benchmark: every method's speed, and where the warm trie helps. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftree.bench.compare_case import Result
from draftree.bench.compare_methods import REFERENCE, WARM, label_of
from draftree.bench.summary import Estimate

OURS, THEIRS, BEST = "#7aa874", "#9aa5b1", "#2f7d32"
DOTS_PER_INCH = 140


def has_matplotlib() -> bool:
    """Whether a picture can be drawn."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write_png(result: Result, folder: Path) -> Path:
    """Draw bench-quick.png into `folder`; returns its path.

    Raises:
        ValueError: matplotlib is missing.
    """
    if not has_matplotlib():
        raise ValueError("The plot needs matplotlib: pip install 'draftree[bench]'.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in result.names if name in result.rows]
    sets = list(result.rows[WARM].by_set) if WARM in result.rows else []
    figure = Figure(figsize=(13 if sets else 8, 1.6 + 0.36 * max(len(names), len(sets))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if sets else 1, squeeze=False)[0]
    _speeds(axes[0], result, names)
    if sets:
        _by_set(axes[1], result, sets)
    about = result.about
    figure.suptitle(
        f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['device']}; {about['prompts']} "
        f"prompts, total tokens / total time, bars: 95 % bootstrap; commit {about['commit'] or 'unknown'}",
        fontsize=9,
        color="0.35",
    )
    path = folder / "bench-quick.png"
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path


def _speeds(axis: Any, result: Result, names: list[str]) -> None:
    estimates = [result.rows[name].speed for name in names]
    colours = [BEST if name == WARM else THEIRS if name.startswith("hf_") else OURS for name in names]
    _bars(axis, [label_of(name) for name in names], estimates, colours, "{:.0f}")
    axis.set_title("Tokens a second, all sets together", loc="left", fontsize=11)
    # The key is in the title's line: bars and intervals may reach any place inside.
    at = 1.0
    for colour, whose, width in ((OURS, "draftree", 0.0), (THEIRS, "Hugging Face", 0.15)):
        at -= width
        axis.text(at, 1.02, f"\u25a0 {whose}", color=colour, transform=axis.transAxes, ha="right", fontsize=10)


def _by_set(axis: Any, result: Result, sets: list[str]) -> None:
    by_set = result.rows[WARM].by_set
    estimates = [by_set[name].over[REFERENCE] for name in sets]
    _bars(axis, sets, estimates, [BEST] * len(sets), "{:.1f}x")
    axis.axvline(1, color=THEIRS, linewidth=1.5)
    axis.set_title("Lookahead with a warm trie: speed over HF generate, by set", loc="left", fontsize=11)


def _bars(axis: Any, labels: list[str], estimates: list[Estimate], colours: list[str], number: str) -> None:
    values = [e.value for e in estimates]
    lows = [e.value if e.low is None else e.low for e in estimates]
    highs = [e.value if e.high is None else e.high for e in estimates]
    at = range(len(labels))
    axis.barh(at, values, color=colours, height=0.68)
    axis.hlines(at, lows, highs, color="0.25", linewidth=1)
    right = max(highs)
    for y, (value, high) in enumerate(zip(values, highs, strict=True)):
        text = axis.text(high + 0.012 * right, y, number.format(value), va="center", fontsize=9, color="0.15")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    axis.set_yticks(at, labels, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, right * 1.12)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8, colors="0.4")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
