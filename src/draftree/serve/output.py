"""Pass outputs from the worker's thread to the event loop: tokens, text, stop strings."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftree.detokenizer import Detokenizer
from draftree.engine import Emitted, SamplingParams
from draftree.engine.request import Request, State, StepTree
from draftree.runner.images import Images
from draftree.serve.settings import ApiError
from draftree.trace.file import BYTE_ALPHABET


class StopStrings:
    """Pass text on up to the first stop string, or with `include` up to its end; hold back text that may become one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._begun = dict.fromkeys(stops, 0)  # Stop string -> characters of its beginning at the end of the text.
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str, *, may_end: bool = True) -> str:
        """Return the text that can be passed on now; without `may_end`, stop strings that end in `piece` are text."""
        if not self._begun:
            return piece
        if self.found is not None:
            return ""
        text, places = self._held + piece, []
        for stop, begun in self._begun.items():
            at = text.find(stop, len(self._held) - begun)
            if at >= 0:
                places.append((at, -len(stop), stop))
            longest = min(begun + len(piece), len(stop) - 1)
            self._begun[stop] = next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
        if places and may_end:
            at, _, self.found = min(places)
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        cut = len(text) - max(self._begun.values())
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """Return the held text at the end."""
        held, self._held = self._held, ""
        return held


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of one token, with the leading space that decoders such as Llama 2's drop."""
    text = str(tokenizer.decode([token]))
    name = str(tokenizer.convert_ids_to_tokens(token))
    return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


class TokenBytes:
    """Return the bytes of tokens, which join to the bytes of the text.

    In byte-level BPE each character of a token's name stands for a byte; with byte fallback the name `<0xE4>` does.
    Other tokens, and added ones, have the bytes of their text alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> list[int]:
        """Return the bytes of one token."""
        name = None if token in self._added else self._tokenizer.convert_ids_to_tokens(token)
        if name is not None and self._byte_level and all(character in BYTE_ALPHABET for character in name):
            return [BYTE_ALPHABET[character] for character in name]
        if name is not None and not self._byte_level and re.fullmatch("<0x[0-9A-F]{2}>", name):
            return [int(name[3:5], 16)]
        return list(token_text(self._tokenizer, token).encode())

    @cached_property
    def _byte_level(self) -> bool:
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)


@dataclass(slots=True)
class Delta:
    """Hold the new tokens and text of one output since its last delta."""

    index: int  # Position of the output in its request.
    text: str = ""  # Without held-back beginnings of stop strings.
    emitted: list[Emitted] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # By token, its text; empty without trees and logprobs.
    trees: list[StepTree] = field(default_factory=list)  # Draft trees of the steps, if the parameters keep them.
    end_token: str = ""  # Text of the special token that ended the output, if its text has special tokens.
    finish: str | None = None  # "stop", "length", "error" or "cancelled" in the last delta.
    error: BaseException | None = None  # Cause of the finish "error".

    def add(self, other: Delta) -> None:
        """Append the next delta."""
        self.text += other.text
        self.emitted += other.emitted
        self.pieces += other.pieces
        self.trees += other.trees
        self.end_token, self.finish, self.error = other.end_token, other.finish, other.error


@dataclass(slots=True)
class RequestOutput:
    """Hold one requested output and its progress; times are by `time.monotonic`."""

    prompt: Sequence[int]
    params: SamplingParams
    stops: Sequence[str] = ()
    include_stop: bool = False  # Keep the found stop string in the text.
    skip_special_tokens: bool = True  # Leave special tokens such as EOS out of the text.
    goes_on: bool = False  # The text continues the text of the prompt, as completions do.
    min_tokens: int = 0  # Stop strings that are complete within this many tokens do not end the output.
    images: Images | None = None  # Of the prompt.
    request: Request | None = None  # The engine's request; None before it was added.
    given: int = 0  # Number of tokens in deltas so far.
    offset: int = 0  # Position of the next token in the text, for `text_offset`.
    added: float = 0.0  # Time of arrival.
    joined: float | None = None  # Time of getting a slot.
    first: float | None = None  # Time of the first token.
    last: float = 0.0  # Time of the latest token.
    finish: str | None = None  # `finish` of the last delta.


class OutputStream:
    """Stream the outputs of one HTTP request; belongs to the event loop that made it.

    A slow reader gets several deltas joined to one, which bounds memory.
    With `whole`, each output is one delta at its end, so that steps do not wake the event loop.
    """

    def __init__(
        self, outputs: list[RequestOutput], timeout: float, end: Callable[[OutputStream], None], *, whole: bool
    ) -> None:
        self.outputs, self.whole = outputs, whole
        self.deadline = time.monotonic() + timeout
        self.abandoned = False
        self.begun: bool | None = None  # At the deadline: some output had left the queue.
        self._end = end
        self.loop = asyncio.get_running_loop()
        self._ready: dict[int, Delta] = {}
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    async def deltas(self, pause: float | None = None) -> AsyncIterator[Delta | None]:
        """Yield deltas until all outputs have finished, and None after `pause` seconds of silence.

        Leaving the loop earlier ends the outputs.
        """
        left = len(self.outputs)
        try:
            while left:
                try:
                    async with asyncio.timeout(pause):
                        await self._news.wait()
                except TimeoutError:
                    yield None
                    continue
                self._news.clear()
                if self._error is not None:
                    raise self._error
                ready, self._ready = self._ready, {}
                for delta in ready.values():
                    left -= delta.finish is not None
                    yield delta
        finally:
            if left:
                self.cancel()

    def cancel(self) -> None:
        """End running outputs; their slots are free after the current step."""
        self._end(self)

    def deliver(self, delta: Delta) -> None:
        """Deliver the output of a step, in the event loop."""
        known = self._ready.get(delta.index)
        if known is None:
            self._ready[delta.index] = delta
        else:
            known.add(delta)
        self._error = self._error or delta.error
        self._news.set()


def hand_over(news: Sequence[tuple[OutputStream, Delta]]) -> None:
    """Deliver the output of a step, in the event loop."""
    for stream, delta in news:
        stream.deliver(delta)


class OutputReader:
    """Read the text of a running output, in the worker's thread."""

    def __init__(self, stream: OutputStream, index: int, tokenizer: Any) -> None:
        self.stream, self.index, self.output = stream, index, stream.outputs[index]
        before = self.output.prompt if self.output.goes_on else ()
        skip = self.output.skip_special_tokens
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, before=before)
        self._tokenizer = tokenizer
        self.stops = StopStrings(self.output.stops, include=self.output.include_stop)
        self.held: Delta | None = None  # All deltas so far of an output that is not streamed.
        self.tokens = 0

    @property
    def request(self) -> Request:
        """Return the engine's request."""
        assert self.output.request is not None
        return self.output.request

    def read(self, token: int) -> tuple[str, str]:
        """Read the next token; return its text, and the text that can be passed on now."""
        self.tokens += 1
        piece = self.detokenizer.feed(token)
        return piece, self.stops.feed(piece, may_end=self.tokens > self.output.min_tokens)

    def news(self, now: float) -> Delta | None:
        """Return the tokens and text since the last call; None for none."""
        output, request = self.output, self.request
        if output.joined is None and (request.state is State.RUNNING or request.stats.steps):
            output.joined = now
        over = request.state is State.FINISHED
        if len(request.output) == output.given and not over:
            return None
        delta, texts = Delta(self.index), []
        for emitted in request.output[output.given :]:
            delta.emitted.append(emitted)
            piece, text = self.read(emitted.token)
            texts.append(text)
            if output.params.keep_trees or output.params.logprobs is not None:
                delta.pieces.append(piece)
            if self.stops.found is not None:
                break
        output.given += len(delta.emitted)
        delta.trees, request.trees = request.trees, []
        if delta.emitted:
            output.first = now if output.first is None else output.first
            output.last = now
        if self.stops.found is not None:
            delta.finish = "stop"
        elif over:
            last = self.stops.feed(self.detokenizer.rest(), may_end=self.tokens > output.min_tokens)
            texts += [last, self.stops.rest()]
            cancelled = "cancelled" if self.stream.abandoned else "length"
            ends = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": cancelled}
            if request.finish_reason == "eos" and not output.skip_special_tokens and request.output:
                delta.end_token = self._special(request.output[-1].token)
            own = isinstance(request.error, ApiError)
            ended = "error" if own else str(request.finish_reason)
            delta.finish = "stop" if self.stops.found is not None else ends.get(ended, "error")
        delta.text = "".join(texts)
        output.finish = delta.finish
        if not self.stream.whole:
            return delta
        if self.held is None:
            self.held = delta
        else:
            self.held.add(delta)
        return None if delta.finish is None else self.held

    def _special(self, token: int) -> str:
        """Return the text of a special token; "" for others."""
        plain = self._tokenizer.decode([token], skip_special_tokens=True)
        return "" if plain else str(self._tokenizer.decode([token], skip_special_tokens=False))
