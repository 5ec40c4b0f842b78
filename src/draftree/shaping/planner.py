"""How many draft tokens a step verifies: as many as give most tokens a second (ProPD, section 4.2).

A step over B requests gives B tokens and as many more as draft tokens are accepted; it takes the time of its rows and
of the drafter's work. Draft tokens of all requests compete, the likeliest first, and n of them are taken where

    (B + sum of the n best probabilities) / T(B + n)

is largest. Where trees are padded to the largest of the batch, a row more is a row more for every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Choice(NamedTuple):
    """What is best for a step.

    Attributes:
        sizes: draft tokens per request.
        gains: accepted draft tokens expected, per request.
        seconds: time expected of the step.
    """

    sizes: list[int]
    gains: list[float]
    seconds: float


def choose(chances: Sequence[np.ndarray], seconds: np.ndarray, *, packed: bool) -> Choice:
    """The sizes with most tokens a second.

    Args:
        chances: for each of B requests [n], probabilities that its draft tokens are accepted, parents before children
            and, as far as the drafter knew, the best first.
        seconds: [r], time of steps with B rows, B + 1, ...; what is beyond is not considered.
        packed: whether only real rows cost; else every tree is padded to the largest.
    """
    batch = len(chances)
    if batch == 1:
        gains = 1.0 + np.concatenate(([0.0], chances[0].cumsum()))[: len(seconds)]
        size = int((gains / seconds[: len(gains)]).argmax())
        return Choice([size], [float(chances[0][:size].sum())], float(seconds[size]))
    if packed:
        # A parent's probability is no smaller than its child's up to noise: running minima keep trees whole.
        falling = [np.minimum.accumulate(own) for own in chances]
        owner = np.repeat(np.arange(batch), [len(own) for own in falling])
        merged = np.concatenate(falling)
        order = np.argsort(-merged, kind="stable")[: len(seconds) - 1]
        gains = batch + np.concatenate(([0.0], merged[order].cumsum()))
        best = int((gains / seconds[: len(gains)]).argmax())
        sizes = np.bincount(owner[order[:best]], minlength=batch).tolist()
        took = float(seconds[best])
    else:
        width = min(max(len(own) for own in chances), (len(seconds) - 1) // batch)
        rows = np.zeros((batch, width))
        for row, own in zip(rows, chances, strict=True):
            row[: len(own)] = own[:width]
        gains = batch + np.concatenate(([0.0], rows.sum(0).cumsum()))
        times = seconds[: batch * width + 1 : batch]
        best = int((gains / times).argmax())
        sizes = [min(best, len(own)) for own in chances]
        took = float(times[best])
    return Choice(sizes, [float(own[:size].sum()) for own, size in zip(chances, sizes, strict=True)], took)


def leads(rooms: Sequence[int], paces: Sequence[float]) -> list[bool]:
    """Which requests of a batch that nobody joins are so far ahead that draft tokens for them save no time.

    The batch is done when its last request is. One that is done sooner even token by token need not hurry.

    Args:
        rooms: tokens that each request may still emit.
        paces: tokens a step that each gets where it drafts.
    """
    last = max(room / pace for room, pace in zip(rooms, paces, strict=True))
    return [room <= last and len(rooms) > 1 for room in rooms]
