"""GrammarDrafter: tokens that a grammar forces are drafted with probability 1.

Examples are keys and punctuation of a JSON object. The model may spell the forced text in other tokens, so it is
verified like any draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftree.drafting.base import Drafter, RequestState
from draftree.tree import Draft, TokenTree


class GrammarDrafter(Drafter):
    """Drafts the tokens that the grammar of a request forces; nothing for requests without one.

    Join it with another drafter by `Merge`, which drafts where the grammar leaves a choice.
    """

    name = "grammar"

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        newest = [request.tokens[-1] for request in requests]
        if all(request.grammar is None for request in requests):
            return TokenTree.roots(torch.tensor(newest, dtype=torch.long, device="cpu"))
        drafts: list[Draft] = []
        for request, budget in zip(requests, budgets, strict=True):
            forced: list[int] = []
            if request.grammar is not None and budget:
                forced = request.grammar.forced(request.answer)[: min(budget, request.remaining - 1)]
            count = len(forced)
            drafts.append((np.array(forced, dtype=np.int64), np.arange(count) - 1, np.zeros(count), self.source))
        return TokenTree.from_drafts(newest, drafts, budgets)
