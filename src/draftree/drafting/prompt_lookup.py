"""The two drafters of one chain that need no training: prompt lookup, and tokens that a grammar forces.

Prompt lookup is the single-branch baseline (LLMA; Hugging Face's `prompt_lookup_num_tokens`): the last few tokens of
the context are searched in the context itself, and what followed them the first time is drafted.

A grammar forces keys and punctuation of a JSON object, for example. The model may spell the forced text in other
tokens, so it is verified like any draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftree.drafting.base import ByRequest, Capabilities, Drafter, RequestState
from draftree.errors import check_least
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


CONFIDENCE = 0.7  # probability of each token of a chain


class PromptLookup(Drafter):
    """Copies what followed the longest matching n-gram of prompt and output.

    Args:
        num_draft_tokens: length of the chain.
        max_ngram_size: longest suffix searched for; shorter ones follow, down to one token.
    """

    name = "prompt-lookup"
    capabilities = Capabilities(copies_prediction=True)

    def __init__(self, num_draft_tokens: int = 10, max_ngram_size: int = 2) -> None:
        check_least(1, num_draft_tokens=num_draft_tokens, max_ngram_size=max_ngram_size)
        self.max_nodes = num_draft_tokens
        self.max_ngram_size = max_ngram_size
        # Each one's prediction and tokens, and how many are there so far.
        self._seen: ByRequest[tuple[np.ndarray, int]] = ByRequest()

    def begin(self, request: RequestState) -> None:
        front = len(request.prediction)  # as if it stood before the prompt
        buffer = np.empty(front + len(request.tokens), dtype=np.int64)
        buffer[:front] = request.prediction
        self._seen[request.id] = buffer, front

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        drafts: list[Draft] = []
        for request, budget in zip(requests, budgets, strict=True):
            drafted = self._continuation(request, min(budget, request.remaining - 1))
            depth = np.arange(1, len(drafted) + 1)
            drafts.append((drafted, depth - 2, depth * np.log(CONFIDENCE), self.source))
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)

    def _continuation(self, request: RequestState, most: int) -> np.ndarray:
        nothing = np.empty(0, dtype=np.int64)
        buffer, known = self._seen[request.id]
        front = len(request.prediction)
        count = front + len(request.tokens)
        if count > len(buffer):
            buffer = np.resize(buffer, 2 * count)
        tokens = buffer[:count]
        tokens[known:] = request.tokens[known - front :]  # also of steps without draft tokens
        self._seen[request.id] = buffer, len(tokens)
        if most < 1:
            return nothing
        for size in range(min(self.max_ngram_size, len(tokens) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            hits = np.flatnonzero((windows == tokens[-size:]).all(1))
            if len(hits):
                start = int(hits[0]) + size
                drafted = tokens[start : start + most]
                ends = np.flatnonzero(np.isin(drafted, request.eos_token_ids))
                return drafted[: int(ends[0]) + 1] if len(ends) else drafted
        return nothing

    def end(self, request: RequestState) -> None:
        self._seen.pop(request.id, None)
