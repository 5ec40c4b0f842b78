"""The lossy rules: typical acceptance, and BiLD's. Texts are no longer those of the plain engine.

Typical acceptance (Medusa, Cai et al., 2024, section 2.3.1) keeps a draft token x after a prefix where
p(x) > min(epsilon, delta exp(-H(p))): the surer the model is (the lower the entropy H of its distribution p), the
likelier a draft token has to be. The longest path of such tokens is accepted, and the token behind it is chosen as
without a drafter.

BiLD (Big Little Decoder, Kim et al., 2023, section 3.4): the large model's pass scores every token that the small one
wrote since its last turn. The first that is further than the rollback threshold from the large model's distribution is
cut off with all behind it, and the large model's own token stands in its place (a rollback); where none is, the large
model adds the next token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from draftree.acceptance.base import Choice, LossyRule, ScoredTree, best_tokens
from draftree.acceptance.sampled import PrefixChooser


@dataclass(frozen=True, slots=True)
class LossyTypical(LossyRule):
    """The lossy rule: keep draft tokens with p > min(posterior_threshold, posterior_alpha exp(-H)).

    p is the distribution of the processed scores (temperature, top_p and the like included), H its entropy in nats. The
    best token always satisfies it, so greedy decoding walks at least as far as under the lossless rule.

    Args:
        posterior_threshold: epsilon, the probability that is always enough.
        posterior_alpha: delta, the share of exp(-H) that is enough where the model is unsure.

    Raises:
        ValueError: a threshold outside 0 to 1, or an alpha outside 0 to 1.
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}: give a number from 0 to less than 1.")

    def keeps(self, scores: Tensor, tokens: Sequence[int]) -> list[float]:
        """Return the probability of each of `tokens` under scores [V]; 0 if the rule rejects it or it is -1."""
        logp = scores.float().log_softmax(-1)
        p = logp.exp()
        entropy = -(p * logp).nansum()  # what processors rule out has p 0 and logp -inf
        least = torch.clamp(self.posterior_alpha * torch.exp(-entropy), max=self.posterior_threshold)
        index = torch.tensor(tokens, device=p.device, dtype=torch.long)
        of_tokens = p[index.clamp(min=0)]
        kept: list[float] = torch.where((of_tokens > least) & (index >= 0), of_tokens, 0.0).tolist()
        return kept

    def walk(self, scored: ScoredTree, chooser: PrefixChooser | None) -> Iterator[Choice]:
        """See `LossyRule.walk`: along the longest path that the rule keeps, of equals the likeliest."""
        tokens = scored.tokens
        path = self._longest(scored, tokens, chooser)
        for node, child in pairwise(path):
            yield node, tokens[child], child
            if chooser is not None:
                chooser.push(tokens[child])
        row = scored.after(path[-1])
        token = int(row.argmax()) if chooser is None else chooser.choose(row)
        assert token is not None
        yield path[-1], token, None
        if chooser is not None:
            chooser.push(token)

    def _longest(self, scored: ScoredTree, tokens: list[int], chooser: PrefixChooser | None) -> list[int]:
        """Return the nodes of the walk, root first."""
        children = scored.children()
        best: tuple[int, float, list[int]] = (1, 1.0, [0])
        open_paths: list[tuple[float, list[int]]] = [(1.0, [0])]
        while open_paths:
            joint, path = open_paths.pop()
            best = max(best, (len(path), joint, path), key=lambda found: found[:2])
            below = children.get(path[-1])
            if not below:
                continue
            row = scored.after(path[-1])
            scores = row if chooser is None else chooser.scores(row, [tokens[node] for node in path[1:]])[0]
            for node, p in zip(below, self.keeps(scores, [tokens[node] for node in below]), strict=True):
                if p > 0:
                    open_paths.append((joint * p, [*path, node]))
        return best[2]


@dataclass(frozen=True, slots=True)
class LossyBiLD(LossyRule):
    """The lossy rule of `draftree.BiLD`: keep a chain up to its first token with a distance over the threshold.

    The distance of a token y is -log p(y) by the large model's raw logits. Its own tokens are chosen as without a
    drafter, with the request's processors and noise. A token that the large model would choose itself is never cut.

    Args:
        threshold: alpha_RB in nats; infinity for no rollback.
    """

    threshold: float = 5.0

    def walk(self, scored: ScoredTree, chooser: PrefixChooser | None) -> Iterator[Choice]:
        """See `LossyRule.walk`: along the chain, up to its first token that is too far."""
        logits = scored.logits  # of a chain that nothing has pruned: row for node
        chain = scored.tokens[1:]
        own = best_tokens(logits[: len(chain) + 1])
        for node, draft_token in enumerate([*chain, None]):
            token = draft_token
            # Distances are computed only where the models differ: each takes a sum over the vocabulary.
            if draft_token is None or (own[node] != draft_token and self._beyond(logits[node], draft_token)):
                token = own[node] if chooser is None else chooser.choose(logits[node])
            assert token is not None
            # What the large model draws may be what the small one drew: there is nothing to cut then.
            yield node, token, node + 1 if token == draft_token else None
            if chooser is not None:
                chooser.push(token)
            if token != draft_token:
                return

    def _beyond(self, logits: Tensor, token: int) -> bool:
        """Return whether a token is too far from the large model's distribution; -1 is no token, and never kept."""
        if token < 0 or self.threshold == math.inf:
            return token < 0
        return -float(logits.float().log_softmax(-1)[token]) > self.threshold
