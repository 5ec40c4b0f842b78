"""Looks at the passes of a running model: how many rows each has, and how many columns they see.

This file alone depends on how passes are run: it stands in for the runner's `run` while it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock


def watching(runner: Any, see: Callable[[int, int, int, Any], None]) -> AbstractContextManager[Any]:
    """Call `see` after every pass while the context is open, with its rows, the columns that the rows see all
    together, the committed columns before it, and its result.
    """
    run: Any = runner.run

    def seen(plan: Any, cache: Any, first: int = 0, encoder: Any = None) -> Any:
        context = int(cache.lengths[first])
        result = run(plan, cache, first, encoder)
        masked = plan.visible.shape[-1] - plan.width  # committed columns that the plan's mask has; others are all seen
        see(plan.width, plan.width * (context - masked) + int(plan.visible[0].sum()), context, result)
        return result

    return mock.patch.object(runner, "run", seen)


@contextmanager
def rows_of_passes(runner: Any) -> Iterator[list[float]]:
    """Yield the rows of every pass in the context; a row that joins after half of the layers counts as half."""
    layers = len(runner.target.layers)
    found: list[float] = []

    def see(rows: int, seen: int, context: int, result: Any) -> None:
        starts = [segment.start for segment in result.segments]
        parts = zip(result.segments, [*starts[1:], layers], strict=True)
        found.append(sum(s.positions.numel() * (end - s.start) / layers for s, end in parts))

    with watching(runner, see):
        yield found
