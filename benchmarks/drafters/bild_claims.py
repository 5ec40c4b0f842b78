"""What BiLD's paper claims, measured: speed at equal quality, quality at equal speed, and what a pass costs.

Curves of quality against latency are compared as a reader of the paper's figures compares them: points that another one
of their own curve beats in time and quality are left out, and at the time of every point of the second curve the first
one is read off the line through its own points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.drafters.bild_ways import BILD, NO_FALLBACK, NO_ROLLBACK, PLAIN, SAMPLED, Pair
from benchmarks.drafters.operations import Operations
from benchmarks.harness.comparisons import rows_of
from benchmarks.harness.measure import of
from benchmarks.harness.quality import METRICS, points
from draftree.bench.measure import FEWEST, Estimate, Share, draws, interval

UNALIGNED, ALIGNED = "unaligned", "aligned"
NOTHING, POINT = "nothing (0.1)", "a point"
LOSSES = {0.1: NOTHING, 1.0: POINT}  # points of BLEU or ROUGE-L that the two rows of table 1 may lose
TIME = "speed on the same prompts"
KINDS = ("flops", "moved")
Claimed = tuple[str, str, str, str, Any]
Scores = NDArray[np.float64]  # `row_statistics` of a way [rows, numbers]


@dataclass(frozen=True)
class Redrawn:
    """A figure of rows that are drawn anew for its interval, and perhaps of prompts that are drawn anew beside them."""

    # Of the numbers of the rows that were drawn, one array for each of `counts`; NaN for none.
    figure: Callable[..., float]
    counts: tuple[int, ...]  # how many rows, and how many prompts, there are to draw from

    @property
    def units(self) -> int:
        """Return the number of rows or of prompts to resample, whichever is smaller."""
        return min(self.counts)

    def columns(self, name: str) -> dict[str, float | None]:
        """Return the figure as rows of tables hold it; NaN without any case, and no interval of under seven."""
        value = self.figure(*map(np.arange, self.counts))
        if self.units < FEWEST or np.isnan(value):
            return Estimate(value).columns(name)
        resampled = [self.figure(*drawn) for drawn in zip(*draws(*self.counts), strict=True)]
        return Estimate(value, *interval(np.array(resampled))).columns(name)


def quality_ratio(metric: str, above: Sequence[Scores], below: Sequence[Scores]) -> Redrawn:
    """Summed points of some ways over those of as many others."""
    count = len(above[0])

    def ratio(rows: NDArray[np.int64]) -> float:
        drawn = np.bincount(rows, minlength=count).astype(float)
        over, under = (sum(points(metric, drawn @ way) for way in side) for side in (above, below))
        return over / under if under else np.nan

    return Redrawn(ratio, (count,))


@dataclass(frozen=True)
class Curve:
    """One curve of quality against latency: its ways, whose rows and prompts can be drawn anew."""

    metric: str
    scores: Sequence[Scores]  # of each way
    seconds: Sequence[NDArray[np.float64]]  # of each way, prompt by prompt

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of rows and of prompts."""
        return len(self.scores[0]), len(self.seconds[0])

    def drawn(self, rows: NDArray[np.int64], prompts: NDArray[np.int64]) -> tuple[list[float], list[float]]:
        """Times and qualities of the points that no other one beats, both rising."""
        weights = np.bincount(rows, minlength=len(self.scores[0])).astype(float)
        quality = [points(self.metric, weights @ way) for way in self.scores]
        time = [float(way[prompts].sum()) for way in self.seconds]
        kept: tuple[list[float], list[float]] = [], []
        for at in sorted(range(len(time)), key=lambda i: (time[i], -quality[i])):
            if not kept[1] or quality[at] > kept[1][-1]:
                kept[0].append(time[at])
                kept[1].append(quality[at])
        return kept


def curve_ratio(above: Curve, below: Curve) -> Redrawn:
    """Summed points of one curve over those of another, at the times of the other one's points.

    Points that are sooner than the whole first curve are left out: of these the first curve says nothing, and the
    figure is of the others alone. Rows (of the qualities) and prompts (of the times) are drawn anew for the interval,
    and the curves with them.
    """

    def ratio(rows: NDArray[np.int64], prompts: NDArray[np.int64]) -> float:
        (times, qualities), there = (curve.drawn(rows, prompts) for curve in (above, below))
        met = [(at, own) for at, own in zip(*there, strict=True) if at >= times[0]]
        sides = [(float(np.interp(at, times, qualities)), own) for at, own in met]
        over, under = (sum(side) for side in zip(*sides, strict=True)) if sides else (0.0, 0.0)
        return over / under if under else np.nan

    return Redrawn(ratio, above.counts)


def reached(above: Curve, below: Curve) -> tuple[int, int]:
    """Return the number of the second curve's points that are compared, and of all its points."""
    here, there = (curve.drawn(*map(np.arange, curve.counts)) for curve in (above, below))
    return sum(time >= here[0][0] for time in there[0]), len(there[0])


def best_points(table: pd.DataFrame, pairs: Sequence[str]) -> list[dict[str, Any]]:
    """Of each pair's grid the fastest point that loses no more than nothing, and than a point, against plain."""
    found = []
    plain = table.loc[table["way"] == PLAIN, "quality"].iloc[0]
    for pair in pairs:
        for loss, words in LOSSES.items():
            grid = table[(table["group"] == BILD) & (table["pair"] == pair) & (table["quality"] >= plain - loss)]
            row: dict[str, Any] = {"pair": pair, "may_lose": words, "way": None}
            if not grid.empty:
                point = grid.loc[grid["times_plain"].idxmax()]
                names = ("way", "quality", "times_plain", "times_plain_low", "times_plain_high", "times_hf")
                row |= {name: point[name] for name in (*names, "large_calls_a_token")}
            found.append(row)
    return found


def claimed(
    table: pd.DataFrame, best: Sequence[dict[str, Any]], pair: Pair, runs: pd.DataFrame, scores: Any, metric: str
) -> pd.DataFrame:
    """Return the ratio of each claim that these ways can speak of.

    The table has a row for each way, with its group, pair, thresholds, quality and speed, `runs` what each did, prompt
    by prompt, and `scores` the `row_statistics` of each that writes a text of its own, by name.
    """
    found = _speeds(table, best, pair, runs) + _qualities(table, pair, runs, scores, metric)
    return rows_of(found + _policies(table, pair, runs, scores, metric))


def _sooner(runs: pd.DataFrame, above: Sequence[str], below: Sequence[str]) -> Share:
    """Total time of ways over that of as many others on the same prompts: texts may have other lengths."""
    times = (np.sum([of(runs, way)["seconds"] for way in ways], 0) for ways in (below, above))
    return Share(*times)


def _speeds(table: pd.DataFrame, best: Sequence[dict[str, Any]], pair: Pair, runs: pd.DataFrame) -> list[Claimed]:
    """Of the best points; those that the grid does not have are left out."""
    ways, pairs = {(row["pair"], row["may_lose"]): row["way"] for row in best}, list(pair.smalls)
    own, within = (ways[pairs[-1], loss] for loss in (NOTHING, POINT))
    sides: list[tuple[str, Any, Any]]
    if pair.exits:
        sides = [("bild-early-exit", within, PLAIN)]
    else:
        theirs = ways[UNALIGNED, NOTHING] if pairs == [UNALIGNED, ALIGNED] else None
        sampled = table[table["group"] == SAMPLED]
        fastest = None if sampled.empty else sampled.loc[sampled["times_plain"].idxmax(), "way"]
        sides = [
            *(("bild-no-loss", own, PLAIN), ("bild-point-large", within, PLAIN)),
            *(("bild-a-point", within, own), ("bild-unaligned", theirs, PLAIN), ("bild-aligned-speed", own, theirs)),
            ("bild-sampling", ways[pairs[0], NOTHING], fastest),
        ]
    there = [(claim, above, below) for claim, above, below in sides if above and below and above != below]
    return [(claim, above, below, TIME, _sooner(runs, [above], [below])) for claim, above, below in there]


def _qualities(
    table: pd.DataFrame, pair: Pair, runs: pd.DataFrame, scores: Mapping[str, Any], metric: str
) -> list[Claimed]:
    """Quality at equal speed of BiLD over what is left out of it, and of the aligned pair."""
    pairs, written = list(pair.smalls), table[table["way"].isin(list(scores))]
    grid = {name: written[(written["group"] == BILD) & (written["pair"] == name)] for name in pairs}
    own = grid[pairs[-1]]
    sides = [
        ("bild-no-rollback", own, BILD, written[written["group"] == NO_ROLLBACK], NO_ROLLBACK),
        ("bild-no-fallback", own, BILD, written[written["group"] == NO_FALLBACK], NO_FALLBACK),
    ]
    if list(grid) == [UNALIGNED, ALIGNED]:
        sides.append(("bild-aligned-quality", own, f"BiLD, {ALIGNED}", grid[UNALIGNED], f"BiLD, {UNALIGNED}"))
    found: list[Claimed] = []
    both = pd.concat(grid.values())
    if not pair.exits and not both.empty:
        best = str(both.loc[both["quality"].idxmax(), "way"])
        ratio = quality_ratio(metric, [scores[best]], [scores[PLAIN]])
        found.append(("bild-above-large", best, PLAIN, METRICS[metric][0], ratio))
    for claim, above, above_name, below, below_name in sides:
        if above.empty or below.empty:
            continue
        curves = [
            Curve(
                metric,
                [scores[way] for way in side["way"]],
                [of(runs, way)["seconds"].to_numpy(float) for way in side["way"]],
            )
            for side in (above, below)
        ]
        met, of_all = reached(*curves)
        what = f"{METRICS[metric][0]} at equal speed, {met} of {of_all} points"
        found.append((claim, above_name, below_name, what, curve_ratio(*curves)))
    return found


def _policies(
    table: pd.DataFrame, pair: Pair, runs: pd.DataFrame, scores: Mapping[str, Any], metric: str
) -> list[Claimed]:
    """Smaller rollback and larger fallback thresholds write better, and slower (figure 9)."""
    grid = table[(table["group"] == BILD) & (table["pair"] == list(pair.smalls)[-1])]
    found: list[Claimed] = []
    if pair.exits:
        return found
    for threshold, other, better in (("rollback", "fallback", min), ("fallback", "rollback", max)):
        values = grid[threshold].unique()
        if len(values) < 2:
            continue
        good, fast = better(values), (max if better is min else min)(values)
        sides = [list(grid[grid[threshold] == value].sort_values(other)["way"]) for value in (good, fast)]
        slow, soon = (f"BiLD, {threshold} threshold {value:g}" for value in (good, fast))
        ratio = quality_ratio(metric, *([scores[way] for way in side] for side in sides))
        found.append((f"bild-{threshold}-quality", slow, soon, METRICS[metric][0], ratio))
        found.append((f"bild-{threshold}-speed", soon, slow, TIME, _sooner(runs, *sides[::-1])))
    return found


def claimed_of_operations(counted: Mapping[str, Sequence[Operations]], way: str) -> pd.DataFrame:
    """Return the claims of Figure 8 for one way over the large model alone, of operations by prompt."""
    flops, moved = ({name: [getattr(one, kind) for one in done] for name, done in counted.items()} for kind in KINDS)
    intensity = Share(flops[way], moved[way]) / Share(flops[PLAIN], moved[PLAIN])
    ratios = [
        ("bild-moved", PLAIN, way, "values moved", Share(moved[PLAIN], moved[way])),
        ("bild-operations", way, PLAIN, "operations", Share(flops[way], flops[PLAIN])),
        ("bild-intensity", way, PLAIN, "operations a value", intensity),
    ]
    return rows_of(ratios)
