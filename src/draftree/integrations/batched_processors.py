"""Hugging Face's logits processors, made for a whole batch, split for requests that advance at different speeds.

In a batch of one nothing changes. In larger ones each request gets copies, as some processors keep state. A copy of a
processor that may distinguish rows by their place in the batch, as those of others may, sees the request's row in all
places of a batch, and of its answer the request's place is taken. A `prefix_allowed_tokens_fn` is told the row, so it
is called for that one alone and shared: what it keeps by row no other row touches.
"""

from __future__ import annotations

from typing import Any

from torch import LongTensor, Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from draftree.engine.criteria import own_copy

# Of Hugging Face's own: they hold something with one entry a row of the batch.
BY_PLACE = (
    stock.RepetitionPenaltyLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
)


def processors_by_request(processors: LogitsProcessorList, count: int) -> list[LogitsProcessorList]:
    """The processors of each of `count` requests.

    Raises:
        ValueError: one that runs a model of its own over the whole batch, such as classifier-free guidance, or one that
            cannot be copied.
    """
    if count == 1:
        return [processors]
    for processor in processors:
        if any(isinstance(value, nn.Module) for value in getattr(processor, "__dict__", {}).values()):
            raise ValueError(
                f"{type(processor).__name__} runs a model over the whole batch at once: call generate with a batch "
                "of 1."
            )
    return [LogitsProcessorList(_own(processor, b, count) for processor in processors) for b in range(count)]


def _own(processor: Any, b: int, count: int) -> Any:
    if type(processor) in BY_PLACE:
        return _InPlace(processor, b, count)
    if type(processor) is stock.PrefixConstrainedLogitsProcessor:
        allowed, row = processor._prefix_allowed_tokens_fn, b // processor._num_beams
        return stock.PrefixConstrainedLogitsProcessor(lambda _, prefix: allowed(row, prefix), 1)
    own = own_copy(processor)
    return own if type(processor).__module__.startswith("transformers.") else _InPlace(own, b, count)


class _InPlace(LogitsProcessor):
    """Shows a processor of `count` rows that of request `b` in all of them, and takes what it says of this row."""

    def __init__(self, processor: Any, b: int, count: int) -> None:
        self.processor, self.b, self.count = processor, b, count

    def __call__(self, input_ids: LongTensor, scores: Tensor) -> Any:
        everywhere = input_ids.expand(self.count, -1)
        answer = self.processor(everywhere, scores.repeat(self.count, 1))
        return answer[self.b : self.b + 1]
