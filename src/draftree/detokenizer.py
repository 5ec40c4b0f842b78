"""Decode a stream of tokens into text, in whole characters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

MOST_HELD = 64  # Tokens held back without complete text; beyond, all but the last `CHARACTER` are emitted.
CHARACTER = 4  # Most tokens of one character.
BEFORE = 16  # Earlier tokens that are read, so that one with text is among them.


class Detokenizer:
    """Text of tokens, piece by piece; joined pieces are the decoded whole.

    One exception: byte tokens may complete a character and then turn out to be invalid UTF-8. The decoded whole has
    replacement characters for all of them, the pieces only for those without text so far.

    Args:
        tokenizer: Hugging Face's.
        skip_special_tokens: omit EOS and other special tokens.
        before: preceding tokens; without them, decoders such as Llama 2's drop a first space.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> None:
        fast = getattr(tokenizer, "_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
        self._decode = partial((tokenizer if fast is None else fast).decode, skip_special_tokens=skip_special_tokens)
        # Tokens of the last piece, then those whose text is not complete.
        self._ids = list(before[-BEFORE:])
        self._text = self._decode(self._ids) if self._ids else ""  # Text of the last piece's tokens.
        if self._text.endswith("\ufffd"):  # An incomplete character.
            self._ids, self._text = [], ""
        self._given = len(self._ids)  # Tokens of the last piece.

    def feed(self, token: int) -> str:
        """Return the text that the token adds; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) > len(self._text) and not text.endswith("\ufffd"):
            return self._give(text, len(self._ids))
        if len(self._ids) - self._given > MOST_HELD:
            count = len(self._ids) - CHARACTER
            return self._give(self._decode(self._ids[:count]), count)
        return ""

    def rest(self) -> str:
        """Return the rest of the text at the end, such as an incomplete character."""
        return self._give(self._decode(self._ids), len(self._ids))

    def _give(self, text: str, count: int) -> str:
        """Return the new part of `text`, the text of the first `count` tokens."""
        news, behind = self._ids[self._given : count], self._ids[count:]
        piece = text[len(self._text) :] if text.startswith(self._text) else str(self._decode(news))
        if piece:  # Without one, the last piece still decides whether a space comes first.
            self._ids, self._given, self._text = news, len(news), self._decode(news)
        else:
            del self._ids[self._given :]
        self._ids += behind
        return piece
