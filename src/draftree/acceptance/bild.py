"""BiLD's rule: what the small model drafted stays unless the large one finds it too unlikely. LOSSY.

Big Little Decoder (Kim et al., 2023), section 3.4. The large model's pass scores every token that the small one wrote
since its last turn. The first that is further than the rollback threshold from the large model's distribution is cut
off with all behind it, and the large model's own token stands in its place (a rollback); where none is, the large model
adds the next token. Texts are no longer those of the plain engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.acceptance.base import Choice, LossyRule, ScoredTree, best_tokens
from draftree.acceptance.sampled import PrefixChooser
from draftree.tree import TokenTree

DISTANCES = ("cross-entropy", "kl", "1-p")


@dataclass(frozen=True, slots=True)
class LossyBiLD(LossyRule):
    """The lossy rule of `draftree.BiLD`: keep a chain up to its first token with a distance over the threshold.

    Policies look at raw logits (section 7.1.2); the large model's own tokens are chosen as without a drafter, with the
    request's processors and noise. A token that the large model would choose itself is never cut.

    Args:
        threshold: alpha_RB in nats ("1-p": a probability); infinity for no rollback.
        distance: of the small model's token y at a place: "cross-entropy", -log p_L(y); "1-p", 1 - p_L(y); "kl", the
            Kullback-Leibler divergence of p_L from p_S, all words considered.
        review: whether the large model has a look at a tail that ends in an end token before the text ends.
        drafted_logp: for "kl", gives the small model's log-probabilities [n, V] at the places of a request's chain.
    """

    threshold: float = 5.0
    distance: str = "cross-entropy"
    review: bool = True
    drafted_logp: Callable[[int], Tensor] | None = None

    def distances(self, logits: Tensor, chain: list[int], drafted_logp: Tensor | None = None) -> Tensor:
        """Return the distances [n] of the tokens of `chain` from the large model's, given its raw logits [n, V]."""
        logp = logits.float().log_softmax(-1)
        if self.distance == "kl":
            assert drafted_logp is not None
            own = drafted_logp.to(logp)
            return (own.exp() * (own - logp)).nansum(-1)  # 0 where the small model rules a word out
        index = torch.tensor(chain, device=logits.device, dtype=torch.long)
        of_tokens = logp.gather(1, index[:, None])[:, 0]
        return -of_tokens if self.distance == "cross-entropy" else 1 - of_tokens.exp()

    def walk(self, scored: ScoredTree, chooser: PrefixChooser | None, request: int | None = None) -> Iterator[Choice]:
        """See `LossyRule.walk`: along the chain, up to its first token that is too far."""
        logits = scored.logits  # of a chain that nothing has pruned: row for node
        chain = scored.tokens[1:]
        own = best_tokens(logits[: len(chain) + 1])
        for node, draft_token in enumerate([*chain, None]):
            token = draft_token
            # Distances are computed only where the models differ: each takes a sum over the vocabulary.
            if draft_token is None or (own[node] != draft_token and self._beyond(logits, node, draft_token, request)):
                token = own[node] if chooser is None else chooser.choose(logits[node])
            assert token is not None
            # What the large model draws may be what the small one drew: there is nothing to cut then.
            yield node, token, node + 1 if token == draft_token else None
            if chooser is not None:
                chooser.push(token)
            if token != draft_token:
                return

    def _beyond(self, logits: Tensor, node: int, draft_token: int, request: int | None) -> bool:
        """Return True if the token after `node` is too far from the large model's distribution."""
        if draft_token < 0 or self.threshold == math.inf:
            return draft_token < 0  # -1 is no token, and never kept
        drafted = None if self.drafted_logp is None or request is None else self.drafted_logp(request)[node : node + 1]
        return float(self.distances(logits[node : node + 1], [draft_token], drafted)[0]) > self.threshold

    def closes(self, tree: TokenTree, b: int, ends: Iterable[int]) -> int | None:
        """See `LossyRule.closes`: the first end token, where the large model does not review it."""
        if self.review:
            return None
        chain = tree.tokens[b, 1 : tree.sizes[b]].tolist()
        places = [chain.index(token) for token in ends if token in chain]
        return min(places) + 1 if places else None
