"""Tokens to text as they come: whole characters only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

MOST_HELD = 64  # tokens without text, or of bytes that make no character, before all but the last few are let go
CHARACTER = 4  # tokens that may be parts of one character
BEFORE = 16  # tokens of what comes before that are looked at; one that has a text would do


class Detokenizer:
    """The text of tokens, piece by piece; the pieces together are the decoded whole.

    Tokens that stand for bytes may give text and then turn out to be no UTF-8, by what comes behind them. The decoded
    whole has replacement characters for all of them then, and the pieces for those that had given nothing.

    Args:
        tokenizer: Hugging Face's.
        skip_special_tokens: leave EOS and the like out.
        before: tokens whose text these go on with; without, decoders such as Llama 2's drop a first space.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> None:
        fast = getattr(tokenizer, "_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
        self._decode = partial((tokenizer if fast is None else fast).decode, skip_special_tokens=skip_special_tokens)
        # Tokens of the last piece, and those behind them, whose text is still to come.
        self._ids = list(before[-BEFORE:])
        self._text = self._decode(self._ids) if self._ids else ""  # which those of the last piece decode to
        if self._text.endswith("\ufffd"):  # half a character, which these may end
            self._ids, self._text = [], ""
        self._given = len(self._ids)  # how many of these are of the last piece

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
        """What is not given yet of `text`, which the first `count` tokens decode to."""
        news, behind = self._ids[self._given : count], self._ids[count:]
        piece = text[len(self._text) :] if text.startswith(self._text) else str(self._decode(news))
        if piece:  # else what was given before goes on to say whether a space comes first
            self._ids, self._given, self._text = news, len(news), self._decode(news)
        else:
            del self._ids[self._given :]
        self._ids += behind
        return piece
