"""What one HTTP request asks of the engine: its prompts, rules and answers, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.drafting.prompt_lookup import PromptLookup
from draftree.engine import Engine
from draftree.engine.limits import check_prompt
from draftree.serve.answers import Call
from draftree.serve.choosing import make_rules, seeds
from draftree.serve.errors import ApiError
from draftree.serve.grammars import Constraint, constraint_of
from draftree.serve.messages import MessageReader, chat_prompt, tools_of
from draftree.serve.parts import Part
from draftree.serve.schema import Chat, Completion, Sampling, plain
from draftree.serve.settings import ServerSettings

COMPLETION_TOKENS = 16  # the API's own default


class Desk:
    """Turns checked bodies into parts for the worker.

    Args:
        engine: answers them.
        tokenizer: the model's.
        settings: limits and names.
    """

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings) -> None:
        self.target = engine.target
        self.drafter = engine.config.drafter
        self.tokenizer = tokenizer
        self.settings = settings
        limits = [n for n in (settings.max_prompt_tokens, self.target.max_positions) if n is not None]
        self.longest = min(limits) if limits else None

    # ---------------------------------------------------------------- completions

    def completion(self, asked: Completion, scope: str | None) -> tuple[Call, list[Part]]:
        """The call of /v1/completions.

        Raises:
            ApiError: what cannot be done, by the name of its field.
        """
        self._check(asked)
        prompts = self._prompts(asked)
        n, tries = asked.n or 1, asked.best_of or asked.n or 1
        if tries < n:
            raise ApiError(f"best_of is {tries} and n is {n}: give a best_of of at least n.", "best_of")
        if asked.stream and tries > n:
            raise ApiError("best_of chooses among whole answers: leave stream or best_of out.", "best_of")
        self._check_count(len(prompts) * tries)
        if asked.max_tokens == 0 and not asked.echo:
            raise ApiError("max_tokens is 0: give at least 1, or ask for the prompt by echo.", "max_tokens")
        most = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        logprobs = asked.logprobs
        if logprobs is None and tries > n:
            logprobs = 0  # by which the best are found
        resumed = (asked.draftree and asked.draftree.resumed_tokens) or 0
        if resumed and (tries > 1 or asked.echo or min(map(len, prompts)) <= resumed):
            raise ApiError(
                "resumed_tokens goes on with one answer: give a longer prompt, and leave n, best_of and echo out.",
                "draftree.resumed_tokens",
            )
        constraint = constraint_of(asked, (), self.tokenizer)
        options = most, tries, logprobs, scope, (), constraint
        parts = [part for prompt in prompts for part in self._parts(asked, prompt, *options)]
        call = self._call("completion", asked, logprobs=asked.logprobs)
        if asked.echo:
            call.echo = [self.tokenizer.decode(part.prompt) for part in parts]
        return call, parts

    def _prompts(self, asked: Completion) -> list[list[int]]:
        given: Any = asked.prompt
        listed = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        special = asked.add_special_tokens is not False
        found = []
        for prompt in listed:
            ids = prompt if isinstance(prompt, list) else self.encode(prompt, special=special)
            found.append(ids)
        return found

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; a lone surrogate becomes a question mark."""
        ids: list[int] = self.tokenizer(text.encode("utf-8", "replace").decode(), add_special_tokens=special).input_ids
        return ids

    # ---------------------------------------------------------------- chats

    def chat(self, asked: Chat, scope: str | None) -> tuple[Call, list[Part]]:
        """The call of /v1/chat/completions.

        Raises:
            ApiError: what cannot be done, by the name of its field.
        """
        self._check(asked)
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            raise ApiError("max_tokens and max_completion_tokens say the same: give one of them.", "max_tokens")
        most = asked.max_completion_tokens or asked.max_tokens
        if most == 0:
            raise ApiError("max_tokens is 0: give at least 1.", "max_tokens")
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError("top_logprobs belongs to logprobs: set logprobs to true.", "top_logprobs")
        if asked.draftree is not None and asked.draftree.resumed_tokens:
            raise ApiError("resumed_tokens belongs to /v1/completions: send ids there.", "draftree.resumed_tokens")
        tools = tools_of(asked, self.tokenizer)
        options = dict(asked.chat_template_kwargs or {})
        if asked.add_generation_prompt is not None:
            options["add_generation_prompt"] = asked.add_generation_prompt
        if tools:
            options["tools"] = tools
        prompt = chat_prompt(self.tokenizer, asked.messages, **options)
        n = asked.n or 1
        self._check_count(n)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        prediction = self._prediction(asked)
        readers = [MessageReader(self.tokenizer, prompt, tools) for _ in range(n)]
        constraint = constraint_of(asked, tools, self.tokenizer, readers[0].begun)
        for reader in readers:
            reader.strips = constraint is not None
        parts = self._parts(asked, prompt, most, n, logprobs, scope, prediction, constraint)
        call = self._call("chat", asked, logprobs=logprobs)
        call.prediction, call.readers = prediction, readers
        for part, reader in zip(parts, call.readers, strict=True):
            part.skip_special_tokens = part.skip_special_tokens and not reader.raw
        return call, parts

    def _prediction(self, asked: Chat) -> list[int]:
        if asked.prediction is None:
            return []
        if not any(parts_of(self.drafter, kind) for kind in (Lookahead, PromptLookup)):
            raise ApiError(
                "This server's drafter makes no use of a prediction: serve with lookahead or prompt-lookup, alone or "
                "merged, or leave prediction out.",
                "prediction",
            )
        return self.encode(plain(asked.prediction.content), special=False)

    # ---------------------------------------------------------------- both

    def _parts(
        self,
        asked: Sampling,
        prompt: list[int],
        most: int | None,
        count: int,
        logprobs: int | None,
        scope: str | None,
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> list[Part]:
        new = self._room(prompt, most)
        parts = []
        for seed in seeds(self.target, asked, count):
            rules = make_rules(
                self.target,
                self.tokenizer,
                asked,
                prompt=prompt,
                max_new_tokens=max(1, new),
                seed=seed,
                logprobs=logprobs,
                prediction=prediction,
                scope=scope,
                constraint=constraint,
            )
            skip = asked.skip_special_tokens is not False
            parts.append(Part(prompt, rules, asked.stops, bool(asked.include_stop_str_in_output), skip))
        return parts

    def _room(self, prompt: list[int], most: int | None) -> int:
        """Tokens that the answer may have.

        Raises:
            ApiError: a prompt that is empty, too long or of unknown tokens, or more tokens than there is room for.
        """
        field = "prompt"
        longest, limit = self.longest, self.target.max_positions
        if longest is not None and len(prompt) > longest:
            raise ApiError(
                f"The prompt has {len(prompt)} tokens and this server reads {longest}: shorten it.",
                field,
                code="context_length_exceeded",
            )
        bound = self.settings.max_output_tokens
        if bound is not None and most is not None and most > bound:
            raise ApiError(f"max_tokens is {most} and this server gives at most {bound}: lower it.", "max_tokens")
        if most is None:
            rooms = [n for n in (bound, None if limit is None else limit - len(prompt)) if n is not None]
            most = max(1, min(rooms, default=4096))
        try:
            check_prompt(prompt, max(1, most), self.target.vocab_size, limit)
        except ValueError as error:
            code = "context_length_exceeded" if "context" in str(error) else None
            raise ApiError(str(error).replace("max_new_tokens", "max_tokens"), field, code=code) from None
        return most

    def _check(self, asked: Sampling) -> None:
        own = self.settings.model_name
        if asked.model is not None and asked.model != own:
            raise ApiError(
                f"There is no model {asked.model[:100]!r} here: ask for {own!r}.",
                "model",
                status=404,
                code="model_not_found",
            )
        if asked.stream_options is not None and not asked.stream:
            raise ApiError("stream_options belongs to streams: set stream to true, or leave it out.", "stream_options")
        name = None if asked.draftree is None else asked.draftree.drafter
        if name not in (None, "off", None if self.drafter is None else self.drafter.name):
            there = "'off'" if self.drafter is None else f"'off' or {self.drafter.name!r}"
            raise ApiError(f"There is no drafter {str(name)[:100]!r} here: give {there}.", "draftree.drafter")

    def _check_count(self, count: int) -> None:
        most = self.settings.most_choices
        if count > most:
            raise ApiError(f"The request asks for {count} answers and this server gives at most {most}.", "n")

    def _call(self, kind: str, asked: Sampling, logprobs: int | None) -> Call:
        streamed = asked.stream_options
        return Call(
            kind,
            self.settings.model_name,
            self.tokenizer,
            logprobs=logprobs,
            usage=bool(streamed and streamed.include_usage),
            each=bool(streamed and streamed.continuous_usage_stats),
            ids=bool(asked.return_token_ids),
            trees=bool(asked.draftree and asked.draftree.trees),
            stats=bool(asked.draftree and asked.draftree.stats),
        )
