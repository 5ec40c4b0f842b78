"""Texts for people: a label for each token alone, the piece that it adds to the text before it, a name for a request.

A token may be half a character, and a tokenizer may need the token before to know of a space. So pieces are cut from
text decoded together, and labels show bytes that are no text as what they are.
"""

from __future__ import annotations

import re
from typing import Any

from draftree.detokenizer import Detokenizer
from draftree.trace.records import Trace

BROKEN = "\ufffd"
# Byte-level tokenizers name printable bytes by themselves and number the others from 256 on.
_PRINTABLE = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
BYTE_ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
LONGEST_NAME = 24  # characters of a prompt by which a request is known
# What chat templates put around a prompt, such as "<|im_start|>user": markers, and the roles behind them.
MARKER = re.compile(
    r"(?:<\|[^<>|\s]+\|>|</?(?:s|bos|pad|think|start_of_turn|end_of_turn)>|\[/?INST\])(?:(?:system|user|assistant|model)\b)?"
)


def request_name(number: int, prompt: str) -> str:
    """A request's number and the beginning of its prompt, as "2: Write a shell command th…".

    Args:
        number: from 1.
        prompt: decoded with its special tokens. Of a dialogue the last turn counts, without what a chat template adds.
    """
    turns = [" ".join(turn.split()) for turn in MARKER.split(prompt)]
    text = next(filter(None, reversed(turns)), "an empty prompt")
    text = "".join(character if character.isprintable() else " " for character in text)
    return f"{number}: {text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + '…'}"


def names_of(trace: Trace) -> dict[int, str]:
    """What each request of a trace is called, by its id."""
    return {
        request: request_name(number, about["prompt_text"])
        for number, (request, about) in enumerate(trace.requests.items(), 1)
    }


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """One piece for each of `ids`; together they are the text, special tokens shown."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    cut = [detokenizer.feed(token) for token in ids]
    if cut:
        cut[-1] += detokenizer.rest()
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
    value = BYTE_ALPHABET.get(character)
    if value is None:
        return character
    return chr(value) if 32 <= value < 127 else f"\\x{value:02x}"
