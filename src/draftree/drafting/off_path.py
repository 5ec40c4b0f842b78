"""How much less often draft tokens hold below a second choice, learned from the text.

Drafters that draft several depths in one pass (BiTA, Hidden Transfer, Medusa) do not know which candidate will be
taken: what they draft for depth d + 1 is made, in effect, for the best candidate of depth d. Below any other one it
holds less often. It is why BiTA's efficient tree beats the full one. `TokenTree.from_candidates` takes the factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FIRST, WEIGHT = 0.5, 20.0  # the factor before any text was seen, and how many cases that counts for
FORGET = 0.99  # weight of the past, per case
LEAST = 0.02  # of the factor, so that it can rise again


class OffPath:
    """Learns how much less often draft tokens hold below a candidate that was not the best of its depth.

    Candidates are compared with what came, verified or not; lossless decoding makes that exact.
    """

    def __init__(self) -> None:
        # Of draft tokens below best candidates, and below others: the probability they claimed, how often they held.
        self._hoped = [WEIGHT, WEIGHT]
        self._came = [WEIGHT, WEIGHT * FIRST]

    @property
    def factor(self) -> float:
        """`off_path` of `TokenTree.from_candidates`: at most 1."""
        on, off = (came / hoped for came, hoped in zip(self._came, self._hoped, strict=True))
        return min(max(off / max(on, 1e-9), LEAST), 1.0)

    def learn(self, tokens: np.ndarray, logp: np.ndarray, text: Sequence[int]) -> None:
        """Candidates [D, K] and the tokens that came in their places (as many as there are, up to D)."""
        stray = 0
        sums = np.exp(logp).sum(1).tolist()
        for depth, token in enumerate(text[: len(tokens)]):
            ranks: list[int] = tokens[depth].tolist()
            rank = ranks.index(token) if token in ranks else -1
            if depth:
                self._hoped[stray] = FORGET * self._hoped[stray] + sums[depth]
                self._came[stray] = FORGET * self._came[stray] + (rank >= 0)
            if rank < 0:
                return
            stray |= rank > 0
