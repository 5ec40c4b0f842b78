"""What `draftree bench bild` prints and draws: table 1, all points, and the pictures after figures 4, 5, 8 and 9."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftree.bench.analysis_setup import Findings, plain_axis
from draftree.bench.bild import NO_LOSS, ONE_POINT, BildResult, Point, label
from draftree.bench.bild_ways import (
    ASSISTED,
    BILD,
    FIXED,
    GROUPS,
    LOSSLESS,
    NO_FALLBACK,
    NO_ROLLBACK,
    PLAIN,
    SMALL,
    THEIRS,
    TREES,
)
from draftree.bench.summary import shown

COLOURS = ("#7aa874", "#2f6fab", "#b5651d", "#8e4ea8")
SLOWEST = 2.0  # times the large model alone; what takes longer is told in the legend, or nothing else could be seen
MARKS = {FIXED: "v", LOSSLESS: "D", TREES: "P", THEIRS: "X", ASSISTED: "d"}


def findings_of(result: BildResult) -> Findings:
    """Tables, rows and picture of a run."""
    rows = [point.as_dict() for point in result.points.values()]
    more = {
        "best": [
            {"pair": pair, "may_lose": loss, "way": point.way.name if point else None}
            for (pair, loss), point in result.best.items()
        ],
        "refused": result.refused,
    }
    return Findings(
        rows, [_best_table(result), _table(result)], lambda f: _draw(f, result), (15, 5.2), more, _remarks(result)
    )


def _best_table(result: BildResult) -> Table:
    metric, plain = result.about["metric"], result.points[PLAIN]
    table = Table(
        title=f"Best points of the grid, after table 1 ({metric} against {result.about['against']})",
        title_justify="left",
    )
    for column in ("pair", "may lose", "thresholds", metric, "times plain", "times HF generate", "large calls a token"):
        table.add_column(column, justify="left" if column in ("pair", "thresholds") else "right")
    table.add_row("large model alone", "", "", f"{plain.quality:.2f}", "1.00", _ratio(plain.over_theirs), "1.00")
    for (pair, loss), point in result.best.items():
        lost = "nothing (0.1)" if loss == NO_LOSS else "a point"
        if point is None:
            table.add_row(pair, lost, "none of the grid", "", "", "", "")
            continue
        calls = f"{point.stats.calls_per_token:.2f}" if point.stats else ""
        numbers = f"FB {point.way.fallback:g}, RB {point.way.rollback:g}"
        table.add_row(
            pair, lost, numbers, f"{point.quality:.2f}", _ratio(point.speed), _ratio(point.over_theirs), calls
        )
    return table


def _table(result: BildResult) -> Table:
    metric = result.about["metric"]
    told = "All ways (calls of the large model a token, share of tokens that it chose, share of its passes that cut)"
    table = Table(title=told, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("way", no_wrap=True)
    for column in (metric, "ms", "times plain", "times HF", "calls", "engaged", "cut", "parted"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in result.points.values():
        if point.seconds is None:
            table.add_row(label(point.way), *[""] * 8)
            continue
        drafts = point.stats is not None and point.stats.drafted > 0
        stats = point.stats
        table.add_row(
            label(point.way),
            "" if point.quality is None else f"{point.quality:.2f}",
            f"{1000 * point.seconds:.0f}",
            _ratio(point.speed),
            f"{point.over_theirs.value:.2f}" if point.over_theirs else "",
            f"{stats.calls_per_token:.2f}" if drafts and stats else "",
            f"{stats.engagement:.0%}" if drafts and stats else "",
            f"{stats.rollback_ratio:.0%}" if drafts and stats else "",
            str(point.differing or ""),
        )
    return table


def _ratio(estimate: Any) -> str:
    return "" if estimate is None else shown(estimate, "{:.2f}")


def _remarks(result: BildResult) -> list[str]:
    about = result.about
    lines = [
        f"{about['metric']} over {about['rows']} rows, time over {about['prompts']} of them, one by one; times are "
        "totals, in brackets 95 % bootstrap over prompts. 'Best' is the fastest measured point of the grid, no "
        "interpolation, chosen and measured on the same rows.",
    ]
    counted = [p for p in result.points.values() if p.operations is not None]
    plain = result.points[PLAIN].operations
    if plain is not None:
        for point in counted:
            if point.way.group != PLAIN and point.operations is not None:
                lines.append(
                    f"{label(point.way)}: {point.operations.flops / plain.flops:.2f} times the operations of the large "
                    f"model alone, {point.operations.moved / plain.moved:.2f} times the values moved, "
                    f"{point.operations.intensity / plain.intensity:.2f} times the arithmetic intensity."
                )
    lines += [f"{name}: not measured, {why}" for name, why in result.refused.items()]
    parted = [p for p in result.points.values() if p.differing]
    if parted:
        count = sum(p.differing for p in parted)
        lines.append(
            f"{count} timed answers of {len(parted)} ways (column 'parted') are not the texts whose quality was taken "
            "(batches round otherwise; or the kept texts are of older code: remove them)."
        )
    return lines


# -------------------------------------------------------------------- pictures


def _draw(figure: Any, result: BildResult) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.5, 1.1, 0.9))
    _curves(left, result)
    _ablations(middle, result)
    _costs(right, result)


def _at(point: Point) -> tuple[float, float] | None:
    if point.speed is None or point.quality is None:
        return None
    return 1 / point.speed.value, point.quality


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def _levels(axis: Any, result: BildResult) -> None:
    quality = result.points[PLAIN].quality or 0.0
    for level in (quality, quality - ONE_POINT):
        axis.axhline(level, color="0.6", linewidth=0.8, linestyle="--")
    axis.plot([1], [quality], "kx", markersize=9, markeredgewidth=2, label="large model alone")


def _curves(axis: Any, result: BildResult) -> None:
    title = f"{result.about['metric']} against latency"
    plain_axis(axis, title, "time of the large model alone = 1", result.about["metric"])
    _levels(axis, result)
    for colour, pair in zip(COLOURS, result.about["smalls"], strict=False):
        grid = [p for p in result.points.values() if p.way.group == BILD and p.way.pair == pair and _at(p)]
        for point in grid:  # larger dots fall back more (figure 9)
            place = _at(point)
            assert place is not None
            axis.plot(*place, "o", color=colour, alpha=0.45, markersize=3 + 7 * (point.way.fallback or 0))
        front = _front([place for p in grid if (place := _at(p))])
        if front:
            axis.plot(*zip(*front, strict=True), color=colour, linewidth=1.5, label=f"BiLD, {pair}")
        for point in result.points.values():
            if point.way.group == SMALL and point.way.pair == pair and (place := _at(point)):
                axis.plot(*place, "*", color=colour, markersize=11, label=f"{pair} model alone")
    for group, mark in MARKS.items():
        places = [place for p in result.points.values() if p.way.group == group and (place := _at(p))]
        near = [place for place in places if place[0] <= SLOWEST]
        beyond = ", ".join(f"{x:.1f}" for x, _ in places if x > SLOWEST)
        if places:
            told = f"{GROUPS[group]} (beyond, at {beyond})" if beyond else GROUPS[group]
            axis.plot(*zip(*near, strict=True) if near else ([], []), mark, color="0.35", markersize=5, label=told)
    axis.set_xlim(left=0)
    axis.legend(frameon=False, fontsize=7)


def _ablations(axis: Any, result: BildResult) -> None:
    pair = list(result.about["smalls"])[-1]
    plain_axis(axis, f"Without rollback, without fallback ({pair})", "time of the large model alone = 1", "")
    _levels(axis, result)
    for colour, group in zip(COLOURS[1:], (BILD, NO_ROLLBACK, NO_FALLBACK), strict=True):
        places = [p for q in result.points.values() if q.way.group == group and q.way.pair == pair and (p := _at(q))]
        if places:
            front, told = _front(places), GROUPS[group]
            axis.plot(*zip(*front, strict=True), "o-", color=colour, markersize=4, linewidth=1.2, label=told)
    axis.legend(frameon=False, fontsize=7)


def _costs(axis: Any, result: BildResult) -> None:
    plain_axis(axis, "Operations, large model alone = 1", "", "")
    plain = result.points[PLAIN].operations
    chosen = [(p, loss) for (pair, loss), p in result.best.items() if p is not None and p.operations and pair]
    if plain is None or not chosen:
        axis.text(0.5, 0.5, "no point of the grid within a point", ha="center", fontsize=8, transform=axis.transAxes)
        return
    names = ("operations", "values moved", "intensity", "speed")
    width = 0.8 / len(chosen)
    for i, (point, loss) in enumerate(chosen):
        done = point.operations
        assert done is not None
        speed = point.speed.value if point.speed else 0.0
        heights = (done.flops / plain.flops, done.moved / plain.moved, done.intensity / plain.intensity, speed)
        places = [x + i * width for x in range(len(names))]
        told = f"{point.way.pair}, {'no loss' if loss == NO_LOSS else 'a point'}"
        axis.bar(places, heights, width=width, color=COLOURS[i % len(COLOURS)], label=told)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(names))], names, fontsize=8)
    axis.axhline(1, color="0.6", linewidth=0.8, linestyle="--")
    axis.legend(frameon=False, fontsize=7)
