"""Turn the fields of a request into an engine's `SamplingParams`, through the builder that `draftree.generate` uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from draftree.engine import SamplingParams
from draftree.engine.limits import eos_token_ids
from draftree.engine.sampling import Options, params_for, read_options
from draftree.runner.target import Target
from draftree.serve.http import ApiError
from draftree.serve.protocol import Sampling

# Fields named as in Hugging Face, with their defaults where neither client nor model sets them.
FIELDS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
}
LEAST_TEMPERATURE = 1e-5  # Lower ones count as 0, because dividing by them overflows.


class OutputPenalties(LogitsProcessor):
    """Apply OpenAI's penalties to tokens of the answer, which follow `prompt` tokens.

    The logit of a token is lowered by `frequency` for each of its occurrences, and once by `presence`.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self._prompt, self._frequency, self._presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` [1, V] less the penalties."""
        answer = input_ids[0, self._prompt :]
        counts = torch.bincount(answer, minlength=scores.shape[1])[: scores.shape[1]].to(scores)
        return scores - self._frequency * counts - self._presence * (counts > 0)


class TokenBias(LogitsProcessor):
    """Add `values` to the logits of the tokens `ids`, which are all different."""

    def __init__(self, ids: Sequence[int], values: Sequence[float]) -> None:
        self._ids = torch.tensor(ids, dtype=torch.long, device="cpu")
        self._values = torch.tensor(values, dtype=torch.float32, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` [1, V] with the bias."""
        return scores.index_add(1, self._ids.to(scores.device), self._values.to(scores)[None])


def options_of(target: Target, tokenizer: Any, body: Sampling) -> Options:
    """Return the decoding options of a request's fields over the model's own, checked.

    Raises:
        ApiError: values contradict each other, or a token is outside the vocabulary.
    """
    own = target.model.generation_config
    fields = {name: getattr(body, name) for name in FIELDS}
    fields = {n: v if v is not None else _own(own, n, FIELDS[n]) for n, v in fields.items()}
    sample = fields["temperature"] >= LEAST_TEMPERATURE
    if sample:
        fields["top_k"] = max(0, fields["top_k"])
    else:
        fields = {"repetition_penalty": fields["repetition_penalty"]}
    stops = body.stop_token_ids or []
    beyond = [token for token in stops if token >= target.vocab_size]
    if beyond:
        message = f"stop_token_ids names token {beyond[0]}: give token ids from 0 to {target.vocab_size - 1}."
        raise ApiError(message, "stop_token_ids")
    ends = tuple(dict.fromkeys([*own_ends(target, body), *stops]))
    given = fields | {"do_sample": sample, "eos_token_id": ends, "num_return_sequences": 1}
    given["min_new_tokens"] = body.min_tokens
    try:
        return read_options(target.model, None, None, tokenizer, {n: v for n, v in given.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise ApiError(str(error)) from None


def own_ends(target: Target, body: Sampling) -> tuple[int, ...]:
    """Return the model's EOS tokens; none with `ignore_eos`."""
    return () if body.ignore_eos else eos_token_ids(target.model)


def sampling_params(
    target: Target, options: Options, body: Sampling, prompt: Sequence[int], max_new_tokens: int, seed: int
) -> SamplingParams:
    """Return the sampling parameters of one output with the `options` of `options_of`; greedy ones ignore `seed`.

    Raises:
        ApiError: `logit_bias` names something else than a token.
    """
    params = params_for(
        target.model,
        options,
        max_new_tokens=max_new_tokens,
        padded_length=len(prompt),
        seed=seed if options.config.do_sample else None,
        encoder_ids=torch.tensor([list(prompt)], dtype=torch.long, device=target.device),
    )
    front = [*_bias(body, target.vocab_size), *_penalties(body, len(prompt))]
    return replace(
        params,
        processors=LogitsProcessorList([*front, *params.processors]),
        drafting=body.own.drafter != "off",
        node_budget=body.own.node_budget,
        keep_trees=bool(body.own.trees),
    )


def _own(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _bias(body: Sampling, vocabulary: int) -> list[LogitsProcessor]:
    bias: dict[int, float] = {}
    for name, value in (body.logit_bias or {}).items():
        written = name.isascii() and name.isdigit() and len(name) < 20 and name == str(int(name))
        if not (written and int(name) < vocabulary):
            raise ApiError(
                f"logit_bias names token {name[:20]!r}: give token ids from 0 to {vocabulary - 1}.", "logit_bias"
            )
        bias[int(name)] = value
    return [TokenBias(list(bias), list(bias.values()))] if bias else []


def _penalties(body: Sampling, prompt: int) -> list[LogitsProcessor]:
    frequency, presence = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
    return [OutputPenalties(prompt, frequency, presence)] if frequency or presence else []
