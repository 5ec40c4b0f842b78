"""Tokens to text as they come: whole characters only, and nothing beyond a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of tokens, piece by piece; the pieces together are the decoded whole.

    Args:
        tokenizer: Hugging Face's.
        skip_special_tokens: leave EOS and the like out.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._fast = getattr(tokenizer, "_tokenizer", None) if tokenizer.is_fast else None
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._begin = self._end = 0  # tokens that the last piece was decoded from, for tokenizers without a stream
        self._given = ""

    def feed(self, token: int) -> str:
        """What the token adds; "" while a character is not complete."""
        self._ids.append(token)
        piece = self._next(token) or ""
        self._given += piece
        return piece

    def _next(self, token: int) -> str | None:
        if self._fast is not None:
            found: str | None = self._stream.step(self._fast, token)
            return found
        before, now = self._decode(self._ids[self._begin : self._end]), self._decode(self._ids[self._begin :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return None
        self._begin, self._end = self._end, len(self._ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left at the end, an incomplete character for one."""
        whole = self._decode(self._ids)
        return whole[len(self._given) :] if whole.startswith(self._given) else ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text


class StopStrings:
    """Passes text on, up to the first stop string; holds back what may become one.

    Args:
        stops: the strings, none of them empty.
        include: whether the one that was found is passed on as well.

    Attributes:
        found: the stop string that ended the text; None while there was none.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """What can be passed on now."""
        if not self._stops:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            at, _, self.found = min(places)
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        hold = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
