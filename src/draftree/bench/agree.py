"""Whether two runs of a comparison say the same: the order of methods, and every speed within both intervals.

An order counts as said only where the intervals of two methods lie apart: what a run leaves open, no other can
contradict. Two speeds agree where they differ by no more than the interval of a difference, the root of the summed
squares of theirs; that one lies within the other's interval would be too much to ask of one in six, by chance alone.

Intervals are bootstraps over prompts. They know how methods differ from prompt to prompt, and nothing of a machine that
runs one kind of code faster in one hour than in another: Hugging Face's ways spend their time in Python and torch's
dispatch, ours in compiled layers, and the two drift apart by a tenth between two quiet runs. So a method is held to the
other run over a reference of its own kind, and what lies between the two references is shown by itself.
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

from draftree.bench.kit import HOOKED

Figure = tuple[float, float, float]  # a speed over a reference, low, high
Figures = dict[str, Figure]  # by method


def read_result(path: Path) -> dict[str, Any]:
    """What `bench compare` wrote.

    Raises:
        ValueError: no such file, or another one.
    """
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for measured in facts["models"]:
            measured["cases"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no result of bench compare: give a bench-compare.json.") from None
    return facts


def agreement(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """A line for each case that both results have, and one for each contradiction."""
    lines = []
    held = {(m["model"], c["about"]["case"]): c for m in first["models"] for c in m["cases"]}
    for measured in second["models"]:
        for case in measured["cases"]:
            title = case["about"]["case"]
            other = held.get((measured["model"], title))
            if other is not None:
                lines += _case(title, other, case)
    return lines or ["The two results have no case in common."]


def _case(title: str, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    reference = first["reference"]
    over_one, over_one_again = (_figures(case, {}, reference) for case in (first, second))
    swapped = [
        f"  {a} and {b} have changed places"
        for a, b in combinations([name for name in over_one if name in over_one_again], 2)
        if _order(over_one[a], over_one[b]) * _order(over_one_again[a], over_one_again[b]) < 0
    ]
    kinds = {name: reference if theirs(name) else first["plain"] for name in over_one}
    before, after = (_figures(case, kinds, reference) for case in (first, second))
    shared = [name for name in before if name in after and name != kinds[name]]
    outside = [
        f"  {name} over {kinds[name]}: {_told(before[name])} and {_told(after[name])}"
        for name in shared
        if not _agree(before[name], after[name])
    ]
    names = [name for name in over_one if name in over_one_again]
    pairs = len(names) * (len(names) - 1) // 2
    facts = (
        f"{title}: {len(swapped)} of {pairs} pairs in another order, {len(outside)} of {len(shared)} speeds further "
        "apart than their intervals explain"
    )
    plain = first["plain"]
    if plain != reference and plain in names:
        facts += f"; {plain} over {reference} {_told(over_one[plain])} and {_told(over_one_again[plain])}"
    return [facts, *swapped, *outside]


def theirs(name: str) -> bool:
    """Whether a method spends its time as Hugging Face's ways do: those, and our engine on their `forward`."""
    return name.startswith("hf_") or name == HOOKED


def _told(figure: Figure) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*figure)


def _agree(a: Figure, b: Figure) -> bool:
    """Whether the difference of two speeds is within its interval."""
    low, high = sorted((a, b))
    return high[0] - low[0] <= math.hypot(low[2] - low[0], high[0] - high[1])


def _order(a: Figure, b: Figure) -> int:
    """1 if a is faster than b, -1 if slower, 0 where their intervals overlap."""
    return (a[1] > b[2]) - (a[2] < b[1])


def _figures(case: dict[str, Any], kinds: dict[str, str], usual: str) -> Figures:
    """Each method's speed over the reference of its kind."""
    found = {}
    for row in case["rows"]:
        speed = row.get("speed_over", {}).get(kinds.get(row["method"], usual))
        if speed is not None:
            value = speed["value"]
            found[row["method"]] = (value, speed["low"] or value, speed["high"] or value)
    return found
