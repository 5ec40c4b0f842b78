"""Choose the number of draft tokens with most tokens per second (ProPD, section 4.2).

A step over B requests gives B tokens and as many more as draft tokens are accepted; it takes the time of its rows and
of the drafter's work. Draft tokens of all requests compete, the likeliest first, and n of them are taken where

    (B + sum of the n best probabilities) / T(B + n)

is largest. Where trees are padded to the largest of the batch, a row more is a row more for every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def choose(chances: Sequence[Sequence[float]], seconds: Sequence[float], *, packed: bool) -> list[int]:
    """Return the number of draft tokens of each request with most tokens per second.

    Args:
        chances: for each of B requests, the probabilities that its draft tokens are accepted, in falling order of what
            the drafter's log-probability; a tree is cut in that order.
        seconds: time of steps with B rows, B + 1, and so on; the last one limits the rows.
        packed: whether only real rows cost; otherwise all trees are padded to the largest.
    """
    batch = len(chances)
    # A tree is cut in its drafter's order, so a later draft token counts for no more than an earlier one.
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
    """Return how many of the `chances`, from the first, give most tokens per second."""
    best, tokens = 0, float(batch)
    fastest = tokens / seconds[0]
    for count, (chance, time) in enumerate(zip(chances, seconds[1:], strict=False), 1):
        tokens += chance
        if tokens > fastest * time:
            best, fastest = count, tokens / time
    return best


def lead(remaining: Sequence[int], lengths: Sequence[float]) -> list[bool]:
    """Return which requests of a closed batch end before the slowest one even without draft tokens.

    Args:
        remaining: tokens that each request may still emit.
        lengths: the acceptance length of each where it drafts.
    """
    last = max(count / length for count, length in zip(remaining, lengths, strict=True))
    return [count < last for count in remaining]
