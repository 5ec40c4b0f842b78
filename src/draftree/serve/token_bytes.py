"""The bytes of single tokens, by which clients join tokens that are parts of a character."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from draftree.trace.labels import BYTE_ALPHABET


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token alone, with the space at its beginning that decoders such as Llama 2's leave out."""
    text = str(tokenizer.decode([token]))
    name = str(tokenizer.convert_ids_to_tokens(token))
    return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


class TokenBytes:
    """Bytes of tokens; those of an answer's tokens in a row are those of its text.

    In byte-level BPE each character of a token's name stands for a byte. Tokens of other tokenizers, and added tokens,
    have the bytes of their text alone.

    Args:
        tokenizer: Hugging Face's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> list[int]:
        """The bytes of one token."""
        if self._byte_level and token not in self._added:
            name = self._tokenizer.convert_ids_to_tokens(token)
            if name is not None and all(character in BYTE_ALPHABET for character in name):
                return [BYTE_ALPHABET[character] for character in name]
        return list(token_text(self._tokenizer, token).encode())

    @cached_property
    def _byte_level(self) -> bool:
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)
