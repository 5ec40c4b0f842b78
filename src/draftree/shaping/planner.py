"""How many draft tokens a step verifies: as many as give most tokens a second (ProPD, section 4.2).

A step over B requests gives B tokens and as many more as draft tokens are accepted; it takes the time of its rows and
of the drafter's work. Draft tokens of all requests compete, the likeliest first, and n of them are taken where

    (B + sum of the n best probabilities) / T(B + n)

is largest. Where trees are padded to the largest of the batch, a row more is a row more for every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def choose(chances: Sequence[Sequence[float]], seconds: Sequence[float], *, packed: bool) -> list[int]:
    """The number of draft tokens of each request with which a step gives most tokens a second.

    Args:
        chances: for each of B requests, the probabilities that its draft tokens are accepted, in falling order of what
            its drafter thinks of them; a tree is cut in that order.
        seconds: time of steps with B rows, B + 1, and so on; what is beyond is not considered.
        packed: whether only real rows cost; else every tree is padded to the largest.
    """
    batch = len(chances)
    # A tree is cut in its drafter's order, so what comes later in it counts for no more than what comes before.
    chances = [list(accumulate(own, min)) for own in chances]
    if batch == 1:
        return [_best(chances[0], seconds, 1)]
    if not packed:
        width = max(map(len, chances))
        together = [sum(own[i] for own in chances if i < len(own)) for i in range(width)]
        best = _best(together, seconds[::batch], batch)
        return [min(best, len(own)) for own in chances]
    offered = [(chance, b) for b, own in enumerate(chances) for chance in own]
    offered.sort(key=lambda each: -each[0])
    sizes = [0] * batch
    for _, b in offered[: _best([chance for chance, _ in offered], seconds, batch)]:
        sizes[b] += 1
    return sizes


def _best(chances: Sequence[float], seconds: Sequence[float], batch: int) -> int:
    """How many of the `chances`, from the first, give most tokens a second."""
    best, tokens = 0, float(batch)
    fastest = tokens / seconds[0]
    for count, (chance, time) in enumerate(zip(chances, seconds[1:], strict=False), 1):
        tokens += chance
        if tokens > fastest * time:
            best, fastest = count, tokens / time
    return best


def lead(rooms: Sequence[int], lengths: Sequence[float]) -> list[bool]:
    """Which requests of a batch that nobody joins are so far ahead that draft tokens for them save no time.

    The batch is done when its last request is. One that is done sooner even token by token need not hurry.

    Args:
        rooms: tokens that each request may still emit.
        lengths: the acceptance length of each where it drafts.
    """
    last = max(room / length for room, length in zip(rooms, lengths, strict=True))
    return [room < last for room in rooms]
