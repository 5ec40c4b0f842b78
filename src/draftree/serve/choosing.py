"""From the fields of a request to an engine's rules, by the way that `draftree.generate` takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from draftree.engine import Rules
from draftree.engine.constraints import compile_grammar
from draftree.engine.limits import eos_token_ids
from draftree.engine.options import read_options, rules_for
from draftree.serve.errors import ApiError
from draftree.serve.grammars import Constraint, refused
from draftree.serve.schema import Sampling

# Fields with a name of Hugging Face's, and what they are where neither client nor model sets them.
FIELDS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
}


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens.

    Args:
        bias: by token id.
    """

    def __init__(self, bias: dict[int, float]) -> None:
        self._tokens = torch.tensor(list(bias), dtype=torch.long, device="cpu")
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [1, V] with the numbers added."""
        return scores.index_add(1, self._tokens.to(scores.device), self._bias.to(scores.device)[None])


class OutputPenalties(LogitsProcessor):
    """OpenAI's penalties: logits fall with each time that a token has come in the answer, and once if it has at all.

    Args:
        prompt: tokens of the prompt, which do not count.
        frequency: by which a logit falls each time.
        presence: by which it falls once.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self._prompt, self._frequency, self._presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [1, V] without the penalties."""
        answer = input_ids[0, self._prompt :]
        counts = torch.bincount(answer, minlength=scores.shape[1])[: scores.shape[1]].to(scores)
        return scores - self._frequency * counts - self._presence * (counts > 0)


def make_rules(
    target: Any,
    tokenizer: Any,
    asked: Sampling,
    *,
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int | None,
    logprobs: int | None = None,
    prediction: Sequence[int] = (),
    scope: str | None = None,
    constraint: Constraint | None = None,
) -> Rules:
    """The rules of one answer.

    Args:
        target: of the engine.
        tokenizer: the model's.
        asked: the request's fields.
        prompt: its token ids.
        max_new_tokens: most tokens of the answer.
        seed: of the draw; None where nothing is drawn.
        logprobs, prediction, scope: see `Rules`.
        constraint: what it may say; None for anything.

    Raises:
        ApiError: values that do not go together, a token outside the vocabulary.
    """
    own = target.model.generation_config
    fields = {name: getattr(asked, name) for name in FIELDS}
    fields = {n: v if v is not None else _own(own, n, FIELDS[n]) for n, v in fields.items()}
    sample = fields["temperature"] > 0
    if sample:
        fields["top_k"] = max(0, fields["top_k"])
    else:
        fields = {"repetition_penalty": fields["repetition_penalty"]}
    own_ends = () if asked.ignore_eos else eos_token_ids(target.model)
    ends = tuple(dict.fromkeys([*own_ends, *(asked.stop_token_ids or ())]))
    resumed = (asked.draftree and asked.draftree.resumed_tokens) or 0
    least = None if asked.min_tokens is None else max(0, asked.min_tokens - resumed)
    given = fields | {"do_sample": sample, "eos_token_id": list(ends), "min_new_tokens": least}
    try:
        options = read_options(target.model, None, None, tokenizer, {n: v for n, v in given.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise ApiError(str(error)) from None
    grammar = None
    if constraint is not None:
        with refused(constraint.field):
            grammar = compile_grammar(constraint.grammar, tokenizer, target.vocab_size, own_ends, least)
    rules = rules_for(
        target.model, options, max_new_tokens=max_new_tokens, padded_length=len(prompt), seed=seed, grammar=grammar
    )
    front = [*_bias(asked, target.vocab_size), *_penalties(asked, len(prompt) - resumed)]
    return replace(
        rules,
        processors=LogitsProcessorList([*front, *rules.processors]),
        drafting=asked.draftree is None or asked.draftree.drafter != "off",
        node_budget=None if asked.draftree is None else asked.draftree.node_budget,
        logprobs=logprobs,
        keep_trees=asked.draftree is not None and bool(asked.draftree.trees),
        prediction=tuple(prediction),
        resumed=resumed,
        scope=scope,
    )


def draws(target: Any, asked: Sampling) -> bool:
    """Whether the tokens of an answer are drawn."""
    temperature = asked.temperature
    if temperature is None:
        temperature = _own(target.model.generation_config, "temperature", FIELDS["temperature"])
    return temperature > 0


def seeds(target: Any, asked: Sampling, count: int) -> list[int | None]:
    """A seed for each of `count` answers; None where nothing is drawn."""
    if not draws(target, asked):
        return [None] * count
    first = random.getrandbits(63) if asked.seed is None else asked.seed
    return [(first + i) % 2**64 for i in range(count)]


def _own(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _bias(asked: Sampling, vocabulary: int) -> list[LogitsProcessor]:
    bias = {}
    for name, value in (asked.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and int(name) < vocabulary):
            raise ApiError(
                f"logit_bias names token {name[:20]!r}: give token ids from 0 to {vocabulary - 1}.", "logit_bias"
            )
        bias[int(name)] = value
    return [LogitBias(bias)] if bias else []


def _penalties(asked: Sampling, prompt: int) -> list[LogitsProcessor]:
    frequency, presence = asked.frequency_penalty or 0.0, asked.presence_penalty or 0.0
    return [OutputPenalties(prompt, frequency, presence)] if frequency or presence else []
