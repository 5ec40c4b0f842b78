"""Whether two runs of `draftree bench compare` agree, for its `--against`.

They agree in the order of methods, and in every speed within both intervals.
An order is certain only where the intervals of two methods lie apart; what one run leaves open, another cannot
contradict. Two speeds agree where they differ by no more than the interval of a difference, the root of the summed
squares of theirs: to lie within the other's interval is too much to expect of one in six, by chance alone.

Intervals are bootstraps over prompts. They cover how methods differ from prompt to prompt, and nothing of a machine
that runs one kind of code faster in one hour than in another: Hugging Face's ways spend their time in Python and
torch's dispatch, ours in compiled layers, and the two drift apart by a tenth between two quiet runs. So each method is
compared over a reference of its own kind, and the ratio of the two references is shown by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from draftree.bench.names import HOOKED, HUGGING_FACE, PLAIN, REFERENCE
from draftree.bench.shares import Estimate

OVER_HF, OVER_PLAIN = "over HF generate", "over plain"  # columns of the rows


Rows = dict[str, dict[str, Any]]  # of one case, by the method's name


def read_result(path: Path) -> dict[str, Any]:
    """What `bench compare` wrote; a ValueError for no such file, or another one."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _cases(facts)
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no result of bench compare: give a bench-compare.json.") from None
    return facts


def agreement(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """A line for each case that both results have, and one for each contradiction."""
    before, after = _cases(first), _cases(second)
    lines = [line for key in after if key in before for line in _compared(key[1], before[key], after[key])]
    return lines or ["The two results have no case in common."]


def _cases(result: dict[str, Any]) -> dict[tuple[str, str], Rows]:
    """The rows of a result by model and case."""
    found: dict[tuple[str, str], Rows] = {}
    for row in result["rows"]:
        found.setdefault((row["model"], row["case"]), {})[row["name"]] = row
    return found


def _compared(title: str, first: Rows, second: Rows) -> list[str]:
    over_hf = OVER_HF if REFERENCE in first and REFERENCE in second else OVER_PLAIN

    def own_kind(name: str) -> str:
        """For methods that spend their time as Hugging Face's do, our engine on their `forward` among them."""
        return over_hf if name in HUGGING_FACE or name == HOOKED else OVER_PLAIN

    a, b = (_speeds(rows, lambda _: over_hf) for rows in (first, second))
    pairs = list(combinations([name for name in a if name in b], 2))
    swapped = [
        f"  {one} and {other} have changed places"
        for one, other in pairs
        if _order(a[one], a[other]) * _order(b[one], b[other]) < 0
    ]
    before, after = (_speeds(rows, own_kind) for rows in (first, second))
    plain = PLAIN if PLAIN in first else HOOKED
    held = [name for name in before if name in after and name not in (REFERENCE, plain)]
    outside = [
        f"  {name} {own_kind(name)}: {before[name]:.2f} and {after[name]:.2f}"
        for name in held
        if not _agree(before[name], after[name])
    ]
    counts = (
        f"{title}: {len(swapped)} of {len(pairs)} pairs in another order, {len(outside)} of {len(held)} speeds further "
        "apart than their intervals explain"
    )
    if over_hf == OVER_HF and plain in a and plain in b:
        counts += f"; {plain} {OVER_HF} {a[plain]:.2f} and {b[plain]:.2f}"
    return [counts, *swapped, *outside]


def _speeds(rows: Rows, column_of: Callable[[str], str]) -> dict[str, Estimate]:
    """By name, each method's speed over a reference: what stands in the column that is its own."""
    columns = {name: column_of(name) for name in rows}
    ends = ("", "_low", "_high")
    return {n: Estimate(*(rows[n][c + end] for end in ends)) for n, c in columns.items() if c in rows[n]}


def _agree(a: Estimate, b: Estimate) -> bool:
    """Whether the difference of two speeds is within its interval."""
    low, high = sorted((a, b), key=lambda speed: speed.value)
    return high.value - low.value <= math.hypot(low.ends[1] - low.value, high.value - high.ends[0])


def _order(a: Estimate, b: Estimate) -> int:
    """1 if a is faster than b, -1 if slower, 0 where their intervals overlap."""
    return (a.ends[0] > b.ends[1]) - (a.ends[1] < b.ends[0])
