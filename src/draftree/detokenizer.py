"""Tokens to text as they come: whole characters only."""

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
        self._fast = getattr(tokenizer, "_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
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
