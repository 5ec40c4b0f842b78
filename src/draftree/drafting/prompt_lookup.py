"""Prompt lookup, the single-branch baseline (LLMA; Hugging Face's `prompt_lookup_num_tokens`).

The last few tokens of the context are searched in the context itself; what followed them the first time is
drafted, in one chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftree.drafting.base import ByRequest, Capabilities, Drafter, RequestState
from draftree.errors import check_least
from draftree.tree import Draft, TokenTree

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
