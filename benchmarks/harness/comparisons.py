"""What a paper claims of two ways of decoding, measured here: the rows that the table of claims is made of.

An experiment says which of its ways stand for a claim of `papers/claims.toml`; the ratio with its interval goes into
the result file, in a table of its own, and `benchmarks.papers.claims` collects it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.harness.measure import length, of, per_token, whole
from draftree.bench.measure import Share

CLAIMED = "What the paper claims"
SPEED, ANSWERS, LENGTH = "tokens a second", "tokens a second of whole answers", "acceptance length"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways of decoding that a claim compares."""

    claim: str  # its name in `claims.toml`
    above: str  # the way that the paper has above
    below: Sequence[str]  # the others; of several the best one is taken, with hindsight
    by: str = SPEED  # `SPEED`, `ANSWERS` (prompts included) or `LENGTH`


def measured(comparisons: Sequence[Comparison], runs: pd.DataFrame, asked: Sequence[str] = ()) -> pd.DataFrame:
    """Return the ratio of each comparison, its interval and its units (prompts, or batches of them).

    `asked` are ways whose times are those of whole answers.
    """
    rows = []
    for one in comparisons:
        timed = whole if one.by == ANSWERS or {one.above, *one.below} & set(asked) else per_token
        shares = {way: _better(of(runs, way), one.by, timed) for way in (one.above, *one.below)}
        below = max(one.below, key=lambda way: shares[way].value)
        ratio = (shares[one.above] / shares[below]).columns("times")
        row = {"claim": one.claim, "above": one.above, "below": below, "of": one.by} | ratio
        rows.append(row | {"units": len(of(runs, one.above))})
    return pd.DataFrame(rows)


def _better(run: pd.DataFrame, by: str, timed: Any) -> Share:
    """Return the figure of which more is better."""
    if by == LENGTH:
        return length(run)
    found: Share = timed(run)
    return Share(found.under, found.over)


def rows_of(ratios: Sequence[tuple[str, str, str, str, Any]]) -> pd.DataFrame:
    """Return the same table from ratios that are there already: claim, above, below, of, ratio."""
    names = ("claim", "above", "below", "of")
    rows = [
        dict(zip(names, one[:4], strict=True)) | one[4].columns("times") | {"units": one[4].units} for one in ratios
    ]
    return pd.DataFrame(rows, columns=None if rows else list(names))
