"""Whether two runs of a comparison say the same: the order of methods, and every speed within the other's interval.

An order counts as said only where the intervals of two methods lie apart: what a run leaves open, no other can
contradict.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

Figures = dict[str, tuple[float, float, float]]  # by method: speed over the reference, low, high


def read_result(path: Path) -> dict[str, Any]:
    """What `bench compare` wrote.

    Raises:
        ValueError: no such file, or another one.
    """
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for measured in told["models"]:
            measured["cases"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no result of bench compare: give a bench-compare.json.") from None
    return told


def agreement(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """A line for each case that both results have, and one for each contradiction."""
    lines = []
    held = {(m["model"], c["about"]["case"]): c for m in first["models"] for c in m["cases"]}
    for measured in second["models"]:
        for case in measured["cases"]:
            title = case["about"]["case"]
            other = held.get((measured["model"], title))
            if other is not None:
                lines += _case(title, _figures(other), _figures(case))
    return lines or ["The two results have no case in common."]


def _case(title: str, first: Figures, second: Figures) -> list[str]:
    shared = [name for name in first if name in second]
    swapped = [
        f"  {a} and {b} have changed places"
        for a, b in combinations(shared, 2)
        if _order(first[a], first[b]) * _order(second[a], second[b]) < 0
    ]
    outside = [
        f"  {name}: {first[name][0]:.2f} [{first[name][1]:.2f}, {first[name][2]:.2f}] and {second[name][0]:.2f} "
        f"[{second[name][1]:.2f}, {second[name][2]:.2f}]"
        for name in shared
        if not (_holds(first[name], second[name]) or _holds(second[name], first[name]))
    ]
    pairs = len(shared) * (len(shared) - 1) // 2
    told = (
        f"{title}: {len(swapped)} of {pairs} pairs in another order, {len(outside)} of {len(shared)} speeds outside "
        "the other run's interval"
    )
    return [told, *swapped, *outside]


def _holds(interval: tuple[float, float, float], value: tuple[float, float, float]) -> bool:
    return interval[1] <= value[0] <= interval[2]


def _order(a: tuple[float, float, float], b: tuple[float, float, float]) -> int:
    """1 if a is faster than b, -1 if slower, 0 where their intervals overlap."""
    return (a[1] > b[2]) - (a[2] < b[1])


def _figures(case: dict[str, Any]) -> Figures:
    found = {}
    for row in case["rows"]:
        speed = row.get("speed_over", {}).get(case["reference"])
        if speed is not None:
            value = speed["value"]
            found[row["method"]] = (value, speed["low"] or value, speed["high"] or value)
    return found
