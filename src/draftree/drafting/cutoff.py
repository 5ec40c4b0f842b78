"""How likely a draft token has to be to be verified, as a drafter sees it from how its trees were cut.

A drafter that pays for each token by a pass of its own need not draft what is left out afterwards: where rows cost
much, as in batches on a CPU, most of a deep tree is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftree.drafting.base import ByRequest, Context, Step
from draftree.tree import TokenTree

RATE = 0.1  # weight of a step


class Cutoff:
    """Learns below which probability draft tokens are left out.

    Attributes:
        probability: of draft tokens that are just verified, that they are accepted, as their drafter sees it; 0 until
            any were left out.
    """

    def __init__(self) -> None:
        self.probability = 0.0
        self._offered: ByRequest[list[float]] = ByRequest()  # log-probabilities of the last drafts, falling

    def drafted(self, requests: Sequence[Context], trees: TokenTree) -> None:
        """These trees are handed over, of draft tokens in falling order."""
        for request, logp, size in zip(requests, trees.logp.tolist(), trees.sizes, strict=True):
            self._offered[request.id] = logp[1:size]

    def verified(self, step: Step, source: int) -> None:
        """Compare them with what was verified of them: the draft tokens that carry the bit `source`."""
        own = ((step.trees.source & source) != 0).sum(1).tolist()
        for request, kept in zip(step.requests, own, strict=True):
            offered = self._offered.pop(request.id, [])
            if kept > len(offered):
                continue  # these were of an earlier step
            last_in = math.exp(offered[kept - 1]) if kept else 1.0
            first_out = math.exp(offered[kept]) if kept < len(offered) else 0.0
            self.probability += RATE * (min(max(self.probability, first_out), last_in) - self.probability)

    def end(self, request: Context) -> None:
        """Forget a request."""
        self._offered.pop(request.id, None)
