"""A dialogue with a model, whose drafter and whose keys and values live on from turn to turn."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, Self

from draftree.detokenizer import Detokenizer
from draftree.drafting import Drafter
from draftree.engine import Emitted, Engine, Request, RunStats, SamplingParams
from draftree.engine.limits import as_seed
from draftree.engine.sampling import params_of
from draftree.errors import check_kind, whole
from draftree.models import encode_messages


class Chat:
    """A dialogue: what was said before is neither read nor learned again.

    Args:
        model: a decoder-only Hugging Face model.
        tokenizer: the model's, with a chat template.
        drafter: drafts, such as `Lookahead()`, which learns from every turn; None decodes plainly.
        system: a system message; None for none.
        max_new_tokens: most tokens of an answer; fewer where the context ends.
        seed: of the draws with `do_sample=True`; turn i draws with seed + i. None takes torch's default generator.
        runner, strict: as in `generate`; with `strict` every turn is read anew.
        options: of Hugging Face's GenerationConfig, such as `do_sample` and `temperature`.

    Attributes:
        messages: the dialogue so far, as chat templates take it.
        requests: the engine's, one for each answer; their `stats` tell how drafting went.

    Raises:
        TypeError, ValueError: options or a model that cannot be, or a tokenizer without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        drafter: Drafter | None = None,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        seed: int | None = 0,
        runner: str = "auto",
        strict: bool = False,
        **options: Any,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("The tokenizer has no chat template, so nobody knows how to write turns: use generate.")
        self._most = whole("max_new_tokens", max_new_tokens)
        self.engine = Engine(model, drafter=drafter, slots=1, runner=runner, strict=strict, keep_prefixes=not strict)
        if self.engine.target.encoder_decoder:
            raise ValueError("A chat needs a decoder-only model: use generate for encoder-decoders.")
        self.tokenizer, self.system = tokenizer, system
        self.requests: list[Request] = []
        if getattr(options.get("generation_config"), "max_new_tokens", None) is not None:
            raise ValueError("The generation_config sets max_new_tokens: give it to Chat itself, and not there.")
        if "max_length" in options:
            raise ValueError("max_length would count the whole dialogue: give max_new_tokens, for each answer.")
        self._options = {"tokenizer": tokenizer} | options
        self._seed = None if seed is None else as_seed(seed)
        self._rules([0], self._most)  # says what is wrong with an option
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget the dialogue; what the drafter has learned stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def send(self, text: str, *, drafting: bool = True) -> Iterator[str]:
        """The answer to `text`, piece by piece; what has come when it is closed, or at Ctrl-C, is the answer.

        Args:
            text: what the user says.
            drafting: False answers this turn without draft tokens.

        Raises:
            TypeError: what is no string.
            ValueError: nothing said, or a dialogue that fills the context.
        """
        detokenizer = Detokenizer(self.tokenizer)
        for emitted in self.stream(text, drafting=drafting):
            piece = detokenizer.feed(emitted.token)
            if piece:
                yield piece
        rest = detokenizer.rest()
        if rest:
            yield rest

    def stream(self, text: str, *, drafting: bool = True) -> Generator[Emitted, None, None]:
        """The same token by token, with the drafter that each came from."""
        before = self.messages
        request = self._ask(text, drafting=drafting)
        turns = self.messages
        try:
            yield from self.engine.stream(request)
        finally:
            if self.messages is turns and (request.error is None or isinstance(request.error, KeyboardInterrupt)):
                said = self.tokenizer.decode(request.tokens, skip_special_tokens=True)
                turns.append({"role": "assistant", "content": said})
            elif self.messages is turns:
                self.messages = before

    def _rules(self, ids: list[int], most: int) -> SamplingParams:
        seed = None if self._seed is None else (self._seed + len(self.requests)) % 2**64
        given = self._options | {"max_new_tokens": most, "seed": seed}
        return params_of(self.engine.target, ids, given)

    def _ask(self, text: str, *, drafting: bool) -> Request:
        """Add a turn to the dialogue, and its answer's request to the engine; neither where it cannot be."""
        if self.engine.busy:
            raise ValueError("An answer is still under way: read it to its end, or close it.")
        check_kind(str, "what the user says, a string", text=text)
        if not (text or "").strip():
            raise ValueError("There is nothing to answer: say something.")
        target, turns = self.engine.target, [*self.messages, {"role": "user", "content": text}]
        ids = encode_messages(self.tokenizer, turns)
        most = self._most
        if target.max_positions is not None:
            most = min(most, target.max_positions - len(ids))
            if most < 1:
                raise ValueError(
                    f"The dialogue has {len(ids)} tokens and the model reads {target.max_positions}: reset it, or say "
                    "less."
                )
        params = self._rules(ids, most)
        request = self.engine.add(ids, replace(params, drafting=drafting))
        self.messages = turns
        self.requests.append(request)
        return request

    def stats(self) -> RunStats:
        """Statistics of all answers so far."""
        return RunStats([request.stats for request in self.requests], self.engine.runner.name)

    def close(self) -> None:
        """Let the model's memory go."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
