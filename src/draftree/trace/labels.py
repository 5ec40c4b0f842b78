"""Tokens as text for people: a label for each token alone, and the piece of text that each adds to what came before.

A token may be half a character, and a tokenizer may need the token before to know of a space. So pieces are cut from
text decoded together, and labels show bytes that are no text as what they are.
"""

from __future__ import annotations

from typing import Any

BROKEN = "\ufffd"
LONGEST_CHARACTER = 8  # tokens that may have to wait for each other before something can be shown


class Pieces:
    """Cuts a text that grows token by token.

    Args:
        tokenizer: decodes ids.
        special: whether special tokens, such as the end of the text, are shown.
    """

    def __init__(self, tokenizer: Any, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = not special
        self._before: list[int] = []  # what was shown last: decides on spaces
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """What becomes readable with this token: nothing while a character is not whole."""
        self._pending.append(token)
        before = self._decode(self._before)
        piece = self._decode(self._before + self._pending)[len(before) :]
        if piece.endswith(BROKEN) and len(self._pending) < LONGEST_CHARACTER:
            return ""
        self._before, self._pending = self._pending, []
        return piece

    def rest(self) -> str:
        """What is left at the end: a character that never became whole."""
        before, pending, self._pending = self._before, self._pending, []
        return self._decode(before + pending)[len(self._decode(before)) :] if pending else ""

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""
        return text


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """One piece for each of `ids`; together they are the text, special tokens shown."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    cutter = Pieces(tokenizer, special=True)
    cut = [cutter.add(token) for token in ids]
    if cut:
        cut[-1] += cutter.rest()
    return cut


def label(tokenizer: Any, token: int) -> str:
    """A token alone: its text; `\\xe2` and the like for bytes that are none; its number without a tokenizer."""
    if tokenizer is None or token < 0:
        return str(token)
    text: str = tokenizer.decode([token])
    name = str(tokenizer.convert_ids_to_tokens(token))
    if BROKEN not in text:
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text  # decoders drop a first space
    if name.startswith("<0x"):
        return "\\x" + name[3:5].lower()
    return "".join(_byte(character) for character in name)


def _byte(character: str) -> str:
    """What a character in a byte-level tokenizer's name stands for."""
    value = _stands_for(character)
    return chr(value) if 32 <= value < 127 else f"\\x{value:02x}"


def _stands_for(character: str) -> int:
    code = ord(character)
    # Byte-level tokenizers name printable bytes by themselves and number the others from 256 on.
    return code if code < 256 else _HIDDEN[(code - 256) % len(_HIDDEN)]


_HIDDEN = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
