"""Display texts: a label for each token alone, the piece that it adds to the text, a name for a request.

A token may be a part of a character, and its spaces may depend on the token before. So pieces are cut from text decoded
together, and labels show incomplete characters as bytes.
"""

from __future__ import annotations

import re
from typing import Any

from draftree.detokenizer import Detokenizer

BROKEN = "\ufffd"
# Byte-level tokenizers name printable bytes by themselves and number the others from 256 on.
_PRINTABLE = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
BYTE_ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
LONGEST_NAME = 24  # Characters of a prompt in the name of its request.
# Markers of chat templates, such as "<|im_start|>user".
MARKER = re.compile(
    r"(?:<\|[^<>|\s]+\|>|</?(?:s|bos|pad|think|start_of_turn|end_of_turn)>|\[/?INST\])(?:(?:system|user|assistant|model)\b)?"
)


def request_name(number: int, prompt: str) -> str:
    """Return a request's number and the beginning of its prompt, such as "2: Write a shell command th…".

    Args:
        number: from 1.
        prompt: decoded with its special tokens. Of a dialogue the last turn is used.
    """
    turns = [" ".join(turn.split()) for turn in MARKER.split(prompt)]
    text = next(filter(None, reversed(turns)), "an empty prompt")
    text = "".join(character if character.isprintable() else " " for character in text)
    return f"{number}: {text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + '…'}"


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return a piece of text for each token; joined they are the text with its special tokens."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    cut = [detokenizer.feed(token) for token in ids]
    if cut:
        cut[-1] += detokenizer.rest()
    return cut


def label(tokenizer: Any, token: int) -> str:
    """Return the text of a token alone, with `\\xe2` for incomplete characters; its id without a tokenizer."""
    if tokenizer is None or token < 0:
        return str(token)
    text: str = tokenizer.decode([token])
    name = str(tokenizer.convert_ids_to_tokens(token))
    if BROKEN not in text:
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text  # Decoders drop a first space.
    if name.startswith("<0x"):
        return "\\x" + name[3:5].lower()
    return "".join(_byte(character) for character in name)


def _byte(character: str) -> str:
    """Return the byte that a character in a byte-level tokenizer's name stands for."""
    value = BYTE_ALPHABET.get(character)
    if value is None:
        return character
    return chr(value) if 32 <= value < 127 else f"\\x{value:02x}"
