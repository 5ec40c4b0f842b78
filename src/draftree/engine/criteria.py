"""Hugging Face's stopping criteria and logits processors for the requests of a batch.

Hugging Face calls a criterion once per step with all rows. Here rows advance at different speeds, so a criterion is
called for one row and its next token. In a batch each row has its own copy of criteria that may keep state. The copy
sees the text of its row in all places of the batch.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import LongTensor, Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation import logits_process as stock

from draftree.engine.limits import as_ids
from draftree.errors import whole
from draftree.runner.base import callers_mode

# Processors of Hugging Face with one entry per row of the batch.
BY_PLACE = (
    stock.RepetitionPenaltyLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
)
SHARED = (PreTrainedTokenizerBase, nn.Module)
STATELESS = (MaxTimeCriteria, StopStringCriteria)


def split_criteria(criteria: StoppingCriteriaList) -> tuple[int | None, tuple[int, ...], StoppingCriteriaList]:
    """Return (max length, EOS ids, other criteria); the engine checks the first two itself."""
    length: int | None = None
    eos: tuple[int, ...] = ()
    rest = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            own = whole("max_length", criterion.max_length)
            length = own if length is None else min(length, own)
        elif type(criterion) is EosTokenCriteria:
            eos += as_ids(criterion.eos_token_id)
        else:
            rest.append(criterion)
    return length, eos, rest


def criteria_by_request(criteria: StoppingCriteriaList, count: int) -> list[StoppingCriteriaList]:
    """Return the criteria of each of `count` requests; a single request gets the given objects."""
    if count == 1:
        return [criteria]
    return [StoppingCriteriaList(_own(criterion, b, count) for criterion in criteria) for b in range(count)]


def _own(criterion: Any, b: int, count: int) -> Any:
    if type(criterion) in STATELESS:
        return criterion
    with suppress(ValueError):  # Rows share criteria that cannot be copied, such as a flag that another thread sets.
        criterion = own_copy(criterion)
    return _InPlace(criterion, b, count)


def own_copy(one: Any) -> Any:
    """Return a deep copy of a processor or a criterion, for one text of a batch; models and tokenizers are shared.

    Functions are shared as well, so one that counts in a variable counts for all texts.

    Raises:
        ValueError: something in it cannot be copied.
    """
    shared = {id(value): value for value in getattr(one, "__dict__", {}).values() if isinstance(value, SHARED)}
    try:
        return copy.deepcopy(one, shared)
    except Exception as error:  # Locks, files and tensors of a graph raise different errors.
        raise ValueError(
            f"{getattr(one, '__name__', type(one).__name__)} cannot be copied, as each text of a batch needs "
            f"({error}): call generate with a batch of 1."
        ) from error


class _InPlace(StoppingCriteria):
    """A criterion of `count` rows that gets the text of request `b` in each row; its verdict on that row counts."""

    def __init__(self, criterion: Any, b: int, count: int) -> None:
        self.criterion, self.b, self.count = criterion, b, count

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        verdict = self.criterion(input_ids.expand(self.count, -1), scores, **options)
        return verdict[self.b] if isinstance(verdict, Tensor) and verdict.numel() == self.count else verdict


class Asked:
    """The criteria of one request, called with the whole text after each token.

    Args:
        criteria: of the request.
        prefix: LongTensor [1, L], the text before the new tokens.
    """

    def __init__(self, criteria: StoppingCriteriaList, prefix: Tensor) -> None:
        self._criteria = criteria
        self._ids = prefix

    def ask(self, token: int) -> bool:
        """Return whether the text ends with `token`, its next one."""
        with callers_mode():
            self._ids = torch.nn.functional.pad(self._ids, (0, 1), value=token)
            verdict: Any = self._criteria(self._ids, None)
        return bool(verdict.all()) if isinstance(verdict, Tensor) else bool(verdict)


def processors_by_request(processors: LogitsProcessorList, count: int) -> list[LogitsProcessorList]:
    """Return the logits processors of each of `count` requests.

    In a batch each request gets copies, because some processors keep state. A copy of a processor that may distinguish
    rows by their place sees the request's row in all places. A `prefix_allowed_tokens_fn` is shared and gets the row
    number.

    Raises:
        ValueError: a processor runs a model over the whole batch, such as classifier-free guidance, or cannot be
        copied.
    """
    if count == 1:
        return [processors]
    for processor in processors:
        if any(isinstance(value, nn.Module) for value in getattr(processor, "__dict__", {}).values()):
            raise ValueError(
                f"{type(processor).__name__} runs a model over the whole batch at once: call generate with a batch "
                "of 1."
            )
    return [LogitsProcessorList(_own_processor(processor, b, count) for processor in processors) for b in range(count)]


def _own_processor(processor: Any, b: int, count: int) -> Any:
    if type(processor) in BY_PLACE:
        return _RowProcessor(processor, b, count)
    if type(processor) is stock.PrefixConstrainedLogitsProcessor:
        allowed, row = processor._prefix_allowed_tokens_fn, b // processor._num_beams
        return stock.PrefixConstrainedLogitsProcessor(lambda _, prefix: allowed(row, prefix), 1)
    own = own_copy(processor)
    return own if type(processor).__module__.startswith("transformers.") else _RowProcessor(own, b, count)


class _RowProcessor(LogitsProcessor):
    """A processor of `count` rows that gets the row of request `b` in each place; its scores of that row count."""

    def __init__(self, processor: Any, b: int, count: int) -> None:
        self.processor, self.b, self.count = processor, b, count

    def __call__(self, input_ids: LongTensor, scores: Tensor) -> Any:
        everywhere = input_ids.expand(self.count, -1)
        answer = self.processor(everywhere, scores.repeat(self.count, 1))
        return answer[self.b : self.b + 1]
