"""Check prompts and options before any work is done; Hugging Face's criteria and processors for the rows of a batch.

Hugging Face calls a criterion once per step with all rows. Here rows advance at different speeds, so a criterion is
called for one row and its next token. In a batch each row has its own copy of criteria that may keep state. The copy
sees the text of its row in all places of the batch.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import numpy as np
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

from draftree.errors import brief, check_kind, check_least, whole
from draftree.grammar import CompiledGrammar
from draftree.runner.base import callers_mode
from draftree.runner.target import rows_of


def check_prompt(prompt: Sequence[int], new: int, vocabulary: int, limit: int | None) -> None:
    """Check that a prompt and `new` tokens fit a context of `limit` tokens (None: unlimited)."""
    check_least(1, math.inf, max_new_tokens=new)
    if not len(prompt):
        raise ValueError("The prompt is empty: give at least one token (the tokenizer's BOS, say).")
    _check_ids(prompt, vocabulary)
    if limit is not None and len(prompt) >= limit:
        raise ValueError(
            f"The prompt has {len(prompt)} tokens and the model's context is {limit}: shorten it to at most "
            f"{limit - 1}."
        )
    if limit is not None and len(prompt) + new > limit:
        raise ValueError(
            f"A prompt of {len(prompt)} tokens leaves room for {limit - len(prompt)} new ones in the model's context "
            f"of {limit}, not {new}: lower max_new_tokens."
        )


def check_mask(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Check that a mask has the shape of the ids [batch, length]; None passes."""
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}: "
            "give one mask value per token."
        )


def check_source(source: Sequence[int], vocabulary: int, limit: int | None) -> None:
    """Check the input of an encoder; arguments as of `check_prompt`."""
    _check_ids(source, vocabulary)
    if limit is not None and len(source) > limit:
        raise ValueError(
            f"The prompt has {len(source)} tokens and the model's encoder reads {limit}: shorten it to at most {limit}."
        )


def check_encoder_side(target: Any, ids: torch.Tensor | None, states: torch.Tensor | None) -> None:
    """Check the encoder input of a request."""
    check_kind(torch.Tensor, "a tensor", encoder_input=ids, encoder_states=states)
    if not target.encoder_decoder:
        if ids is not None or states is not None:
            raise ValueError("This model has no encoder: leave encoder_input and encoder_states out.")
    elif ids is not None:
        vocabulary = rows_of(target.model)
        check_source(ids.tolist(), vocabulary, target.max_positions)
    elif states is None:
        raise ValueError("This model has an encoder: give its input as encoder_input (token ids).")


def _check_ids(prompt: Sequence[int], vocabulary: int) -> None:
    for token in prompt:
        if type(token) is not int and not isinstance(token, Integral):  # The second check is slow.
            raise ValueError(f"The prompt holds {token!r}: give a flat sequence of token ids (whole numbers).")
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"The prompt holds token id {token}, outside the model's vocabulary of {vocabulary}: "
                "tokenize it with this model's own tokenizer."
            )


def check_grammar(grammar: CompiledGrammar | None, end_tokens: Sequence[int], vocabulary: int) -> None:
    """Check that a compiled grammar fits the model and can end; None passes."""
    if grammar is None:
        return
    if not isinstance(grammar, CompiledGrammar):
        raise ValueError(f"grammar is a {type(grammar).__name__}: pass what Grammar.compile(tokenizer, ...) returns.")
    if grammar.vocabulary != vocabulary:
        raise ValueError(
            f"The grammar was compiled for a vocabulary of {grammar.vocabulary}, and the model has {vocabulary}: "
            "compile it for this model."
        )
    missing = set(grammar.end_tokens) - set(end_tokens)
    if missing:
        raise ValueError(
            f"The grammar ends answers by token {min(missing)}, at which this request does not stop: compile it with "
            "the request's eos_token_ids."
        )


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return the EOS ids of a model's generation config."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    return as_ids(ids)


def decoder_start(config: Any) -> int:
    """Return the first token of an encoder-decoder's decoder."""
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if start is None:
        raise ValueError(
            "The model names no decoder_start_token_id: pass it as an option, or set it in its generation config."
        )
    check_least(0, math.inf, decoder_start_token_id=start)
    return int(start)


def as_ids(ids: Any) -> tuple[int, ...]:
    """Return EOS ids as a tuple, without negative ones."""
    if ids is None:
        return ()
    try:
        given = np.ravel(ids.tolist() if isinstance(ids, torch.Tensor) else ids).tolist()
        numbers = [operator.index(i) for i in given]
    except (TypeError, ValueError):
        raise ValueError(f"eos_token_id is {brief(repr(ids))}: give a token id, or a list of them.") from None
    return tuple(i for i in numbers if i >= 0)


def as_seed(seed: Any) -> int:
    """Return a seed as an int of at most 64 bits, signed or not; it may be a tensor of one integer."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed is {seed!r}: give a whole number, or None for torch's default generator.") from None
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed is {number}: give a whole number of at most 64 bits.")
    return number


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
    """The criteria of one request, called with the whole text after each token."""

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
