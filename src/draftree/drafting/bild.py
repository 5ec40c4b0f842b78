"""BiLD: a small model writes, a large one takes over where the small one is unsure, and corrects it. LOSSY by choice.

Big Little Decoder (Kim et al., 2023): the small model writes token by token until its best token is less
likely than the fallback threshold; then the large model reads all of that in one pass, cuts it where the rollback
threshold is passed, and adds a token of its own. In this library's terms: a drafter of chains with an acceptance rule
that belongs to it (`draftree.acceptance.LossyBiLD`), in the one loop of all methods. The rule changes texts;
`lossless=True` has the same two models under the lossless one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from draftree.acceptance.lossy import LossyBiLD
from draftree.drafting.base import RequestState
from draftree.drafting.second_model import SecondModel
from draftree.errors import check_kind, check_least
from draftree.runner.base import top_tokens
from draftree.tree import Draft, TokenTree

Chain = list[tuple[int, float]]  # tokens, and their log-probabilities


class BiLD(SecondModel):
    """Two models write one text: LOSSY, unless `lossless` is set.

    Pass it as the drafter: it brings its acceptance rule and the size of its drafts along, so neither `acceptance` nor
    `shape` nor `pruner` goes with it. The large model writes the first token; under sampling both models draw with the
    request's own processors and the same noise at the same place.

    Args:
        model: the small model, a Hugging Face causal language model, or an encoder-decoder for one.
        fallback_threshold: alpha_FB, 0 to 1; the large model takes over before a token whose place has no word as
            likely as this. 0: never, so that it comes after every `num_draft_tokens` tokens.
        rollback_threshold: alpha_RB, 0 or more; the large model cuts the text at a token y with -log p(y) over it.
            None or infinity: never. Of no effect under `lossless`.
        lossless: keep only what the large model chooses itself: its own text, at the cost of more passes.
        num_draft_tokens: most tokens of the small model in a turn (section 7.1.2: 10).
        runner: how the small model is driven: auto, hooked, eager, cpu, cuda_graphs or in_place.

    Raises:
        TypeError, ValueError: a model that cannot draft, or an option out of range.
    """

    name = "bild"

    def __init__(
        self,
        model: Any,
        fallback_threshold: float = 0.6,
        rollback_threshold: float | None = 5.0,
        *,
        lossless: bool = False,
        num_draft_tokens: int = 10,
        runner: str = "auto",
    ) -> None:
        check_options(fallback_threshold, rollback_threshold, num_draft_tokens)
        super().__init__(model, runner)
        self.fallback_threshold, self.rollback_threshold = fallback_threshold, rollback_threshold
        self.lossless, self.num_draft_tokens = lossless, num_draft_tokens
        # The thresholds alone decide how long a chain is: no shape may weigh it against the cost of rows.
        self.max_nodes = self.node_budget = num_draft_tokens
        if not lossless:
            self.acceptance = LossyBiLD(math.inf if rollback_threshold is None else float(rollback_threshold))

    def source_name(self, source: int) -> str:
        return "bild-lossless" if self.lossless else "bild-lossy"

    def _grow(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        reaches = [
            self._reach(request, min(self.num_draft_tokens, budget)) if self._may_write(request) else 0
            for request, budget in zip(requests, budgets, strict=True)
        ]
        ids = [request.id for request in requests]
        chains: list[Chain] = [[] for _ in requests]
        writing = [reach > 0 for reach in reaches]
        for depth in range(max(reaches)):  # each pass of the small model adds a token to the chains that go on
            if depth == 0:
                texts = [request.tokens if goes else None for request, goes in zip(requests, writing, strict=True)]
                logits = self._small.read(ids, texts)[:, None]
            else:
                newest = [[chain[-1][0]] if goes else [] for chain, goes in zip(chains, writing, strict=True)]
                logits = self._small.grow(ids, newest, [[depth - 2] * len(own) for own in newest], depth)
            best, logp = (found[:, 0, 0].tolist() for found in top_tokens(logits, 1))
            for b, (request, chain) in enumerate(zip(requests, chains, strict=True)):
                goes = writing[b] and math.exp(logp[b]) >= self.fallback_threshold
                if goes:
                    chain.append(self._written(request, chain, logits[b, 0].float(), best[b], logp[b]))
                writing[b] = goes and depth + 1 < reaches[b] and chain[-1][0] not in request.eos_token_ids
            if not any(writing):
                break
        drafts: list[Draft] = []
        for chain in chains:
            tokens, scores = [token for token, _ in chain], [own for _, own in chain]
            drafts.append((tokens, range(-1, len(chain) - 1), np.cumsum(scores), self.source))
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)

    def _may_write(self, request: RequestState) -> bool:
        """Return whether it is the small model's turn: the large one writes a text's first token."""
        return self.lossless or len(request.tokens) > request.prompt_length

    def _written(
        self, request: RequestState, chain: Chain, logits: Tensor, best: int, best_logp: float
    ) -> tuple[int, float]:
        """Return the next token of a chain and its log-probability, from logits [V] with the likeliest token `best`."""
        # Processors may keep a state, which draft tokens must not change where the text is to stay as it is.
        if request.chooser is None or self.lossless:
            return best, best_logp
        token = request.chooser.draft(logits, [drafted for drafted, _ in chain])
        return token, float(logits.log_softmax(-1)[token])


def check_options(
    fallback_threshold: float = 0.6, rollback_threshold: float | None = 5.0, num_draft_tokens: int = 10
) -> None:
    """Refuse options of `BiLD` that are out of range."""
    thresholds = {"fallback_threshold": fallback_threshold, "rollback_threshold": rollback_threshold}
    check_kind(Real, "a number", **thresholds)
    if not 0 <= fallback_threshold <= 1:
        raise ValueError(
            f"fallback_threshold is {fallback_threshold}: give a probability from 0 (never fall back) to 1."
        )
    if rollback_threshold is not None and not rollback_threshold >= 0:
        raise ValueError(f"rollback_threshold is {rollback_threshold}: give 0 or more, or None (never roll back).")
    check_least(1, num_draft_tokens=num_draft_tokens)
