"""Hugging Face's logits processors, made for a whole batch, split for requests that advance at different speeds.

In a batch of one nothing changes. In larger ones each request gets copies (some processors keep state), and those
that distinguish rows by their place in the batch see the request's row in that place.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import LongTensor, Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

# They hold something with one entry a row of the batch.
BY_PLACE = (
    stock.RepetitionPenaltyLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.PrefixConstrainedLogitsProcessor,
)


def processors_by_request(processors: LogitsProcessorList, count: int) -> list[LogitsProcessorList]:
    """The processors of each of `count` requests.

    Raises:
        ValueError: one that runs a model of its own over the whole batch, such as classifier-free guidance.
    """
    if count == 1:
        return [processors]
    for processor in processors:
        if any(isinstance(value, nn.Module) for value in vars(processor).values()):
            raise ValueError(
                f"{type(processor).__name__} runs a model over the whole batch at once: call generate with a batch "
                "of 1."
            )
    return [LogitsProcessorList(_own(p, b, count) for p in processors) for b in range(count)]


def _own(processor: Any, b: int, count: int) -> Any:
    if isinstance(processor, BY_PLACE):
        return _InPlace(processor, b, count)
    return copy.deepcopy(processor)


class _InPlace(LogitsProcessor):
    """Shows a stateless processor of `count` rows the one row of request `b`, where it looks for it."""

    def __init__(self, processor: Any, b: int, count: int) -> None:
        self.processor, self.b, self.count = processor, b, count

    def __call__(self, input_ids: LongTensor, scores: Tensor) -> Any:
        everywhere = input_ids.expand(self.count, -1)
        answer = self.processor(everywhere, scores.repeat(self.count, 1))
        return answer[self.b : self.b + 1]
