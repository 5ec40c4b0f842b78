"""Looks at the passes of a running model: how many rows each has, and how many columns they see.

This file alone depends on how passes are run: it stands in for the runner's `run` while it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Rows:
    """Rows of the passes seen; a row that joins after half of the layers counts as half."""

    rows: float = 0.0


@contextmanager
def watching(runner: Any, see: Callable[[int, int, int, Any], None]) -> Iterator[None]:
    """Call `see` after every pass while the context is open, with its rows, the columns that the rows see all
    together, the committed columns before it, and its result.
    """
    run: Any = runner.run

    def seen(plan: Any, cache: Any, first: int = 0, encoder: Any = None) -> Any:
        context = int(cache.lengths[first])
        result = run(plan, cache, first, encoder)
        facts = plan.visible.shape[-1] - plan.width  # committed columns of which the plan speaks
        see(plan.width, plan.width * (context - facts) + int(plan.visible[0].sum()), context, result)
        return result

    runner.run = seen
    try:
        yield
    finally:
        del runner.run


@contextmanager
def rows_of_passes(runner: Any, into: Rows) -> Iterator[None]:
    """Count the rows of all passes into `into` while the context is open."""
    layers = len(runner.target.layers)

    def see(rows: int, seen: int, context: int, result: Any) -> None:
        starts = [segment.start for segment in result.segments]
        for segment, end in zip(result.segments, [*starts[1:], layers], strict=True):
            into.rows += segment.positions.shape[0] * segment.positions.shape[1] * (end - segment.start) / layers

    with watching(runner, see):
        yield
