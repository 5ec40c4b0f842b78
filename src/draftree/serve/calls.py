"""Turn a request into prompts and sampling parameters, checked before any work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftree.engine import Engine
from draftree.engine.limits import check_prompt
from draftree.serve.chat import MessageReader, chat_prompt, template_variables, tools_of
from draftree.serve.grammars import Constraint, constraint_of, refused
from draftree.serve.http import ApiError
from draftree.serve.output import RequestOutput
from draftree.serve.protocol import Chat, Completion, Sampling, Tokenize, plain
from draftree.serve.responses import Call
from draftree.serve.sampling import options_of, own_ends, sampling_params
from draftree.serve.settings import ServerSettings

COMPLETION_TOKENS = 16  # Default of the API.


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
        n, tries = body.n or 1, body.tries
        if tries < n:
            raise ApiError(f"best_of is {tries} and n is {n}: give a best_of of at least n.", "best_of")
        if body.stream and tries > n:
            raise ApiError("best_of chooses among whole answers: leave stream or best_of out.", "best_of")
        one_each = tries == 1 or len(listed) > self.max_choices
        self._check_count(len(listed) * tries, "prompt" if one_each else "n" if body.best_of is None else "best_of")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError("max_tokens is 0: give at least 1, or ask for the prompt by echo.", "max_tokens")
        most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        logprobs = body.logprobs
        if logprobs is None and tries > n:
            logprobs = 0  # `best` compares log-probabilities.
        if body.add_special_tokens is not None and not isinstance(listed[0], str):
            message = "add_special_tokens is for texts, and the prompt is token ids: leave it out."
            raise ApiError(message, "add_special_tokens")
        special = body.add_special_tokens is not False
        prompts = [one if isinstance(one, list) else self.encode(one, special=special) for one in listed]
        constraint = constraint_of(body, (), self.tokenizer)
        more = {"logprobs": logprobs, "cache_salt": cache_salt}
        outputs = [output for prompt in prompts for output in self._outputs(body, prompt, most, constraint, **more)]
        call = Call(body, self.settings.model_name, self.tokenizer, body.logprobs)
        if body.echo:
            shown = [one if isinstance(one, str) else self.tokenizer.decode(one) for one in listed]
            call.echo = [text for text in shown for _ in range(tries)]
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
        self._check_count(body.tries, "n")
        tools = tools_of(body, self.tokenizer)
        options = template_variables(self.tokenizer, body.chat_template_kwargs)
        if body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        if tools:
            options["tools"] = tools
        prompt = chat_prompt(self.tokenizer, body.messages, **options)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prediction = self._prediction(body)
        readers = [MessageReader(self.tokenizer, prompt, tools) for _ in range(body.tries)]
        constraint = constraint_of(body, tools, self.tokenizer, readers[0].begun)
        for reader in readers:
            reader.strips = constraint is not None
        more = {"logprobs": logprobs, "cache_salt": cache_salt, "prediction": tuple(prediction)}
        outputs = self._outputs(body, prompt, most, constraint, **more)
        call = Call(body, self.settings.model_name, self.tokenizer, logprobs, prediction=prediction, readers=readers)
        for output, reader in zip(outputs, readers, strict=True):
            output.skip_special_tokens = output.skip_special_tokens and not reader.raw
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
        """Return the token ids of /tokenize.

        Raises:
            ApiError: the body has no prompt or messages or has both, or they are too long.
        """
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("Give a prompt or messages, one of both.", "prompt")
        given = "prompt" if body.messages is None else "messages"
        other = "add_generation_prompt" if body.messages is None else "add_special_tokens"
        if getattr(body, other) is not None:
            raise ApiError(f"{other} has no meaning for {given}: leave {other} out.", other)
        if body.messages is not None:
            add = body.add_generation_prompt is not False
            ids = chat_prompt(self.tokenizer, body.messages, add_generation_prompt=add)
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
        seeds = [(first + i) % 2**64 for i in range(body.tries)]
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
        """Return the remaining tokens: the largest number of tokens of the output.

        Raises:
            ApiError: the prompt is empty, too long or has unknown tokens, or `most` exceeds the remaining tokens.
        """
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
