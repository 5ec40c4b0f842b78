"""The two sentences that a case's report opens with: which method was fastest, and whether all answers are equal.

The gain of draftree's loop over HF generate and the gain of drafting over that loop are two figures, and stand apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.bench.names import REFERENCE, RUNNERS, label_of

if TYPE_CHECKING:
    from draftree.bench.case import Result

PLAIN_DECODING = "draftree's plain decoding"


def verdict(result: Result) -> str:
    """Both sentences about a finished case."""
    return f"{_fastest(result)} {_equality(result)}"


def _fastest(result: Result) -> str:
    """The fastest method, over plain decoding and over HF generate; or that none is faster than plain decoding."""
    rows, plain = result.rows, result.baselines.plain
    others = [name for name in rows if name not in RUNNERS]  # those are plain decoding too
    if not others:
        return f"Only {PLAIN_DECODING} was measured."
    best = max(others, key=lambda name: rows[name].speed.value)
    over = rows[best].over
    gain = over.get(plain)
    if gain is not None and (gain.low is None or gain.low <= 1):
        how = "beyond its interval" if gain.low is not None else "for sure, as one prompt gives no interval"
        own = rows[plain].over.get(REFERENCE)
        more = "" if own is None or best == REFERENCE else f", and plain decoding {own:.2f} times that of HF generate"
        return (
            f"No method here is faster than {PLAIN_DECODING} {how}: the best one, {label_of(best)}, has "
            f"{gain:.2f} times its speed{more}."
        )
    found = f"The fastest method here is {label_of(best)}"
    parts = [
        f"{over[reference]:.2f} times the speed of {name}"
        for reference, name in ((plain, PLAIN_DECODING), (REFERENCE, "HF generate"))
        if reference in rows and reference != best
    ]
    missing = "" if plain in rows else f"; {PLAIN_DECODING} was not measured"
    return f"{found}{', with ' if parts else ''}{' and '.join(parts)}{missing}."


def _equality(result: Result) -> str:
    """Whether all answers are those of the reference."""
    compared = [name for name in result.rows if name not in result.baselines.uncompared]
    if len(compared) < 2:
        return "There are no answers of two methods to compare."
    differing = [f"{label_of(name)} ({len(row.differing)})" for name, row in result.rows.items() if row.differing]
    if differing:
        reference = label_of(result.baselines.reference)
        return f"Not all answers are equal: prompts whose answer is not that of {reference} are {', '.join(differing)}."
    if len(compared) < len(result.rows):
        return "All answers that can be compared are equal."
    return "All answers are equal."
