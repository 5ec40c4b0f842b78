"""A dialogue with a model. The drafter and the KV cache are reused from turn to turn."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from draftree.by_name import as_drafter
from draftree.detokenizer import Detokenizer
from draftree.drafting import Drafter
from draftree.encoding import encode_seen, seen_content
from draftree.engine import Emitted, Engine, Request, RunStats, SamplingParams
from draftree.engine.limits import as_seed
from draftree.engine.sampling import params_of
from draftree.errors import check_kind, whole
from draftree.runner.images import check_family


class Chat:
    """A dialogue; earlier turns are neither read nor learned again.

    Args:
        model: a decoder-only Hugging Face model.
        tokenizer: the model's, with a chat template.
        drafter: such as `Lookahead()` or "lookahead", which learns from every turn; None for plain decoding.
        system: a system message, or None.
        max_new_tokens: limit of an answer, besides the context.
        seed: of sampling with `do_sample=True`; turn i uses seed + i. None uses torch's default generator.
        runner, strict: as in `generate`; with `strict` each turn reads the whole dialogue.
        options: of Hugging Face's GenerationConfig, such as `do_sample` and `temperature`.

    Attributes:
        messages: the dialogue so far, in the form of chat templates.
        requests: the engine's, one for each answer, with their `stats`.

    Raises:
        TypeError, ValueError: a bad option, an encoder-decoder, or a tokenizer without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        drafter: Drafter | str | None = None,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        seed: int | None = 0,
        runner: str = "auto",
        strict: bool = False,
        **options: Any,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("The tokenizer has no chat template: use generate.")
        drafter = as_drafter(drafter, model, tokenizer)
        self._most = whole("max_new_tokens", max_new_tokens)
        self.engine = Engine(model, drafter=drafter, slots=1, runner=runner, strict=strict, keep_prefixes=not strict)
        if self.engine.target.encoder_decoder:
            raise ValueError("A chat needs a decoder-only model: use generate for encoder-decoders.")
        self.tokenizer, self.system = tokenizer, system
        self.requests: list[Request] = []
        if getattr(options.get("generation_config"), "max_new_tokens", None) is not None:
            raise ValueError("The generation_config sets max_new_tokens: give it to Chat instead.")
        if "max_length" in options:
            raise ValueError("max_length would count the whole dialogue: give max_new_tokens, for each answer.")
        self._options = {"tokenizer": tokenizer} | options
        self._seed = None if seed is None else as_seed(seed)
        self._params([0], self._most)  # Bad options raise here, not in the first turn.
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget the dialogue, but not what the drafter has learned."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def send(self, text: str, *, images: Sequence[Any] = (), drafting: bool = True) -> Iterator[str]:
        """Yield the answer to `text`, piece by piece; if closed early, or at Ctrl-C, the pieces so far are the answer.

        Args:
            text: the user's message.
            images: what the message shows, before its text: files, their bytes, or images of PIL.
            drafting: False answers this turn without draft tokens.

        Raises:
            TypeError: `text` is no string.
            ValueError: `text` is blank, the dialogue fills the context, or an image cannot be read.
        """
        detokenizer = Detokenizer(self.tokenizer)
        for emitted in self.stream(text, images=images, drafting=drafting):
            piece = detokenizer.feed(emitted.token)
            if piece:
                yield piece
        rest = detokenizer.rest()
        if rest:
            yield rest

    def stream(self, text: str, *, images: Sequence[Any] = (), drafting: bool = True) -> Generator[Emitted, None, None]:
        """Yield the answer token by token, each with its drafter; see `send`."""
        before = self.messages
        request = self._ask(text, images, drafting=drafting)
        turns = self.messages
        try:
            yield from self.engine.stream(request)
        finally:
            if self.messages is turns and (request.error is None or isinstance(request.error, KeyboardInterrupt)):
                said = self.tokenizer.decode(request.tokens, skip_special_tokens=True)
                turns.append({"role": "assistant", "content": said})
            elif self.messages is turns:
                self.messages = before

    def _params(self, ids: list[int], most: int) -> SamplingParams:
        seed = None if self._seed is None else self._seed + len(self.requests)
        given = self._options | {"max_new_tokens": most, "seed": seed}
        return params_of(self.engine.target, ids, given)

    def _ask(self, text: str, images: Sequence[Any], *, drafting: bool) -> Request:
        """Add a turn to the dialogue and its request to the engine; an error adds neither."""
        if self.engine.busy:
            raise ValueError("An answer is still under way: read it to its end, or close it.")
        check_kind(str, "the user's message, a string", text=text)
        if not (text or "").strip():
            raise ValueError("The message is blank: give a text.")
        target = self.engine.target
        if images:
            check_family(target)
        turns = [*self.messages, {"role": "user", "content": seen_content(text, images)}]
        ids, inputs = encode_seen(self.tokenizer, turns)
        most = self._most
        if target.max_positions is not None:
            most = min(most, target.max_positions - len(ids))
            if most < 1:
                raise ValueError(
                    f"The dialogue has {len(ids)} tokens and the model reads {target.max_positions}: reset it, or "
                    "shorten the message."
                )
        params = self._params(ids, most)
        request = self.engine.add(ids, replace(params, drafting=drafting), inputs=inputs)
        self.messages = turns
        self.requests.append(request)
        return request

    def stats(self) -> RunStats:
        """Return the statistics of all answers so far."""
        return RunStats([request.stats for request in self.requests], self.engine.runner.name)

    def close(self) -> None:
        """Free the engine's memory."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
