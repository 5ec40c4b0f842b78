"""An answer at work in the worker's thread: its text so far, and what has come of it since the last look."""

from __future__ import annotations

from typing import Any

from draftree.detokenizer import Detokenizer
from draftree.engine.request import State
from draftree.serve.delivery import Answers
from draftree.serve.errors import ApiError
from draftree.serve.parts import Delta
from draftree.serve.text import StopStrings


class Live:
    """A part at work in the worker's thread: its text so far."""

    def __init__(self, answers: Answers, index: int, tokenizer: Any) -> None:
        self.answers, self.index = answers, index
        self.part = answers.parts[index]
        before = self.part.prompt if self.part.goes_on else ()
        skip = self.part.skip_special_tokens
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, before=before)
        self._tokenizer = tokenizer
        self.stops = StopStrings(self.part.stops, include=self.part.include_stop)
        self.held: Delta | None = None  # of an answer that is wanted whole
        self.tokens = 0  # of the answer

    def read(self, token: int) -> tuple[str, str]:
        """The answer's next token: what it adds to the text, and what of the text can be given now."""
        self.tokens += 1
        piece = self.detokenizer.feed(token)
        return piece, self.stops.feed(piece, may_end=self.tokens > self.part.min_tokens)

    def news(self, now: float) -> Delta | None:
        """What has come since the last call; None where nothing has."""
        part = self.part
        request = part.request
        assert request is not None
        if part.joined is None and (request.state is State.RUNNING or request.stats.steps):
            part.joined = now
        over = request.state is State.FINISHED
        if len(request.output) == part.given and not over:
            return None
        delta, texts = Delta(self.index), []
        for emitted in request.output[part.given :]:
            delta.emitted.append(emitted)
            piece, text = self.read(emitted.token)
            texts.append(text)
            if part.params.keep_trees or part.params.logprobs is not None:
                delta.pieces.append(piece)
            if self.stops.found is not None:
                break
        part.given += len(delta.emitted)
        delta.trees, request.trees = request.trees, []
        if delta.emitted:
            part.first = now if part.first is None else part.first
            part.last = now
        if self.stops.found is not None:
            delta.finish = "stop"
        elif over:
            last = self.stops.feed(self.detokenizer.rest(), may_end=self.tokens > part.min_tokens)
            texts += [last, self.stops.rest()]
            cancelled = "cancelled" if self.answers.abandoned else "length"
            ends = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": cancelled}
            if request.finish_reason == "eos" and not part.skip_special_tokens and request.output:
                delta.end_token = self._special(request.output[-1].token)
            own = isinstance(request.error, ApiError)
            ended = "error" if own else str(request.finish_reason)
            delta.finish = "stop" if self.stops.found is not None else ends.get(ended, "error")
        delta.text = "".join(texts)
        part.finish = delta.finish
        if not self.answers.whole:
            return delta
        if self.held is None:
            self.held = delta
        else:
            self.held.add(delta)
        return None if delta.finish is None else self.held

    def _special(self, token: int) -> str:
        """The text of a special token; "" of another one."""
        if self._tokenizer.decode([token], skip_special_tokens=True):
            return ""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))
