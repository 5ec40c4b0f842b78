"""Turn a request into prompts and sampling parameters, checked before any work.

The parameters are made by the builder that `draftree.generate` uses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, SequenceBiasLogitsProcessor

from draftree.engine import Engine, SamplingParams
from draftree.engine.limits import check_prompt, eos_token_ids
from draftree.engine.sampling import Options, params_for, read_options
from draftree.runner.images import check_family, check_images, images_of
from draftree.runner.target import Target
from draftree.serve.chat import MessageReader, chat_prompt, template_variables, tools_of
from draftree.serve.grammars import Constraint, constraint_of, refused
from draftree.serve.output import RequestOutput
from draftree.serve.protocol import Chat, Completion, ImagePart, Sampling, Tokenize, plain
from draftree.serve.respond import RENAMED, Respond, chat_of
from draftree.serve.responses import Call
from draftree.serve.settings import ApiError, ServerSettings
from draftree.serve.templates import chat_text

COMPLETION_TOKENS = 16  # Default of the API.
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


class CallReader:
    """Turn checked bodies into `RequestOutput`s for the worker."""

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings) -> None:
        self.target = engine.target
        self.drafter = engine.config.drafter
        self.tokenizer = tokenizer
        self.settings = settings
        # More outputs than slots and queue hold together could never start.
        self.max_choices = min(settings.max_choices, engine.config.slots + settings.queue)
        limits = [n for n in (settings.max_prompt_tokens, self.target.max_positions) if n is not None]
        self.longest = min(limits) if limits else None

    def completion(self, body: Completion, cache_salt: str | None) -> tuple[Call, list[RequestOutput]]:
        """Return the call of /v1/completions and its outputs, or raise an ApiError that names a wrong field."""
        self._check(body)
        given: Any = body.prompt
        listed = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        one_each = body.count == 1 or len(listed) > self.max_choices
        self._check_count(len(listed) * body.count, "prompt" if one_each else "n")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError("max_tokens is 0: give at least 1, or ask for the prompt by echo.", "max_tokens")
        most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if body.add_special_tokens is not None and not isinstance(listed[0], str):
            message = "add_special_tokens is for texts, and the prompt is token ids: leave it out."
            raise ApiError(message, "add_special_tokens")
        special = body.add_special_tokens is not False
        prompts = [one if isinstance(one, list) else self.encode(one, special=special) for one in listed]
        constraint = constraint_of(body, (), self.tokenizer)
        more = {"logprobs": body.logprobs, "cache_salt": cache_salt}
        outputs = [output for prompt in prompts for output in self._outputs(body, prompt, most, constraint, **more)]
        call = Call(body, self.settings.model_name, self.tokenizer, body.logprobs, unused=body.unused)
        if body.echo:
            shown = [one if isinstance(one, str) else self.tokenizer.decode(one) for one in listed]
            call.echo = [text for text in shown for _ in range(body.count)]
        return call, outputs

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        return ids

    def chat(self, body: Chat, cache_salt: str | None) -> tuple[Call, list[RequestOutput]]:
        """Return the call of /v1/chat/completions and its outputs, or raise an ApiError that names a wrong field."""
        self._check(body)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise ApiError("max_tokens and max_completion_tokens are the same option: give one of them.", "max_tokens")
        most = body.max_completion_tokens or body.max_tokens
        if most == 0:
            raise ApiError("max_tokens is 0: give at least 1.", "max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs belongs to logprobs: set logprobs to true.", "top_logprobs")
        self._check_count(body.count, "n")
        tools = tools_of(body, self.tokenizer)
        unused, options = body.unused, template_variables(self.tokenizer, body.chat_template_kwargs)
        if body.reasoning_effort is not None and "reasoning_effort" in chat_text(self.tokenizer):
            options = {"reasoning_effort": body.reasoning_effort} | options
        elif body.reasoning_effort is not None:
            unused.append("reasoning_effort")
        if body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        if tools:
            options["tools"] = tools
        try:
            if any(isinstance(part, ImagePart) for one in body.messages for part in one.content or ()):
                check_family(self.target)
            prompt, inputs = chat_prompt(self.tokenizer, body.messages, self.settings.images, **options)
            images = images_of(self.target, inputs)
            check_images(self.target, prompt, images)
        except ValueError as error:
            raise ApiError(str(error), "messages") from None
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prediction = self._prediction(body)
        readers = [MessageReader(self.tokenizer, prompt, tools) for _ in range(body.count)]
        constraint = constraint_of(body, tools, self.tokenizer, readers[0].begun)
        for reader in readers if constraint is not None and not tools else ():
            reader.hold()
        more = {"logprobs": logprobs, "cache_salt": cache_salt, "prediction": tuple(prediction)}
        outputs = self._outputs(body, prompt, most, constraint, **more)
        own: dict[str, Any] = {"prediction": prediction, "readers": readers, "unused": unused}
        call = Call(body, self.settings.model_name, self.tokenizer, logprobs, **own)
        for output, reader in zip(outputs, readers, strict=True):
            output.skip_special_tokens = output.skip_special_tokens and not reader.raw
            output.images = images
        return call, outputs

    def respond(self, body: Respond, cache_salt: str | None) -> tuple[Call, list[RequestOutput]]:
        """Return the call of /v1/responses and its outputs, or raise an ApiError that names a wrong field."""
        try:
            call, outputs = self.chat(chat_of(body), cache_salt)
        except ApiError as error:
            for old, new in RENAMED.items():
                error.message = error.message.replace(old, new)
                error.param = error.param and error.param.replace(old, new)
            raise
        others: dict[str, Any] = {"include": body.include, "max_tool_calls": body.max_tool_calls}
        others["reasoning.summary"] = body.reasoning and body.reasoning.summary
        call.unused = [*call.unused, *(name for name, value in others.items() if value)]
        return call, outputs

    def _prediction(self, body: Chat) -> list[int]:
        if body.prediction is None:
            return []
        if body.own.drafter == "off":
            raise ApiError("A prediction needs a drafter, and the drafter is off: leave one out.", "prediction")
        if self.drafter is None or not self.drafter.capabilities.copies_prediction:
            raise ApiError(
                "This server's drafter does not use predictions: serve with lookahead or prompt-lookup, alone or "
                "merged, or leave prediction out.",
                "prediction",
            )
        prediction = self.encode(plain(body.prediction.content), special=False)
        self.check_length(prediction, "prediction")
        return prediction

    def tokenize(self, body: Tokenize) -> list[int]:
        """Return the token ids of /tokenize."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("Give a prompt or messages, one of both.", "prompt")
        given = "prompt" if body.messages is None else "messages"
        other = "add_generation_prompt" if body.messages is None else "add_special_tokens"
        if getattr(body, other) is not None:
            raise ApiError(f"{other} has no meaning for {given}: leave {other} out.", other)
        if body.messages is not None:
            add = body.add_generation_prompt is not False
            ids = chat_prompt(self.tokenizer, body.messages, self.settings.images, add_generation_prompt=add)[0]
        else:
            ids = self.encode(body.prompt or "", special=body.add_special_tokens is not False)
        self.check_length(ids, given)
        return ids

    def _outputs(
        self, body: Sampling, prompt: list[int], most: int | None, constraint: Constraint | None, **shared: Any
    ) -> list[RequestOutput]:
        """Return the outputs for one prompt; `shared` are further fields of their `SamplingParams`."""
        new = self._remaining(body, prompt, most)
        if body.min_tokens is not None and body.min_tokens > new:
            raise ApiError(f"min_tokens is {body.min_tokens} and the answer has at most {new}: lower it.", "min_tokens")
        if body.own.node_budget and (self.drafter is None or body.own.drafter == "off"):
            raise ApiError("node_budget bounds draft tokens, and nothing drafts: leave it out.", "draftree.node_budget")
        target, options = self.target, options_of(self.target, self.tokenizer, body)
        if constraint is not None:
            with refused(constraint.field):
                ends = own_ends(target, body)
                shared["grammar"] = constraint.grammar.compile(self.tokenizer, target.vocab_size, ends)
        first = random.getrandbits(63) if body.seed is None else body.seed
        seeds = [(first + i) % 2**64 for i in range(body.count)]
        return [
            RequestOutput(
                prompt,
                replace(sampling_params(target, options, body, prompt, new, seed), **shared),
                stops=body.stops,
                include_stop=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                goes_on=isinstance(body, Completion),
                min_tokens=body.min_tokens or 0,
            )
            for seed in seeds
        ]

    def _remaining(self, body: Sampling, prompt: list[int], most: int | None) -> int:
        """Return the remaining tokens: the largest number of tokens of the output."""
        source = "messages" if isinstance(body, Chat) else "prompt"
        length = "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
        limit, bound = self.target.max_positions, self.settings.max_output_tokens
        self.check_length(prompt, source)
        if bound is not None and most is not None and most > bound:
            raise ApiError(f"{length} is {most} and this server gives at most {bound}: lower it.", length)
        if most is None:
            bounds = [n for n in (bound, None if limit is None else limit - len(prompt)) if n is not None]
            most = max(1, min(bounds, default=4096))
        sent = getattr(body, length) is not None
        for new, field in ((1, source), (max(1, most), length if sent else source)):
            try:
                check_prompt(prompt, new, self.target.vocab_size, limit)
            except ValueError as error:
                code = "context_length_exceeded" if "context" in str(error) else None
                raise ApiError(str(error).replace("max_new_tokens", length), field, code=code) from None
        return most

    def check_length(self, ids: Sequence[int], field: str) -> None:
        """Raise an ApiError about `field` if its token ids are over the limit."""
        if self.longest is not None and len(ids) > self.longest:
            what = "prediction" if field == "prediction" else "prompt"
            message = f"The {what} has {len(ids)} tokens and this server reads {self.longest}: shorten it."
            raise ApiError(message, field, code="context_length_exceeded")

    def check_model(self, name: str | None) -> None:
        """Raise an ApiError unless `name` is None, the model's name, or its hub name or folder."""
        own = self.settings.model_name
        if name not in (None, own, self.settings.root or own):
            message = f"There is no model {str(name)[:100]!r} here: ask for {own!r}."
            raise ApiError(message, "model", status=404, code="model_not_found")

    def _check(self, body: Sampling) -> None:
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError("stream_options belongs to streams: set stream to true, or leave it out.", "stream_options")
        name = body.own.drafter
        if name not in (None, "off", None if self.drafter is None else self.drafter.name):
            there = "'off'" if self.drafter is None else f"'off' or {self.drafter.name!r}"
            raise ApiError(f"There is no drafter {str(name)[:100]!r} here: give {there}.", "draftree.drafter")

    def _check_count(self, count: int, field: str) -> None:
        most = self.max_choices
        if count > most:
            message = f"The request asks for {count} answers and this server gives at most {most}: ask for fewer."
            raise ApiError(message, field)


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


def options_of(target: Target, tokenizer: Any, body: Sampling) -> Options:
    """Return the decoding options of a request's fields over the model's own, checked."""
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
    """Return the sampling parameters of one output with the `options` of `options_of`; greedy ones ignore `seed`."""
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
    bias: list[Any] = []
    for name, value in (body.logit_bias or {}).items():
        written = name.isascii() and name.isdigit() and len(name) < 20 and name == str(int(name))
        if not (written and int(name) < vocabulary):
            raise ApiError(
                f"logit_bias names token {name[:20]!r}: give token ids from 0 to {vocabulary - 1}.", "logit_bias"
            )
        bias.append([[int(name)], value])
    return [SequenceBiasLogitsProcessor(bias)] if bias else []


def _penalties(body: Sampling, prompt: int) -> list[LogitsProcessor]:
    frequency, presence = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
    return [OutputPenalties(prompt, frequency, presence)] if frequency or presence else []
