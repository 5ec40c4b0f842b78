"""The grammar as a logits processor of Hugging Face's, which is where greedy and sampled choices look at it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from draftree.grammar.llguidance import GrammarError
from draftree.grammar.state import GrammarState

# What Hugging Face puts behind processors that a caller adds; a grammar is added like them.
LAST = ("LogitsWarper", "WatermarkLogitsProcessor", "LogitNormalization")


class GrammarProcessor(LogitsProcessor):
    """Rules out what the grammar does not allow behind the true prefix.

    Args:
        state: of the answer.
        start: where the answer begins in what the processor is shown.
    """

    def __init__(self, state: GrammarState, start: int) -> None:
        self.state, self._start = state, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [1, V] with -inf where the grammar forbids a token.

        Raises:
            GrammarError: nothing is left, as other options forbid all that the grammar allows.
        """
        allowed = torch.from_numpy(self.state.allowed(input_ids[0, self._start :].tolist()))
        left = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if bool(left.amax() == -torch.inf):
            raise GrammarError(
                "The grammar allows here only tokens that other options forbid (min_new_tokens, bad words, suppressed "
                "tokens): loosen one of them."
            )
        return left


def with_grammar(processors: LogitsProcessorList, own: GrammarProcessor) -> LogitsProcessorList:
    """`processors` with a grammar's, in the place where Hugging Face's `generate` puts those that a caller adds."""
    place = next((i for i, p in enumerate(processors) if type(p).__name__.endswith(LAST)), len(processors))
    return LogitsProcessorList([*processors[:place], own, *processors[place:]])
