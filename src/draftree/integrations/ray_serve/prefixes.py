"""Beginnings of texts, and which replica has seen which of them."""

from __future__ import annotations

import json
from collections import OrderedDict
from itertools import islice
from typing import Any

BLOCK = 64  # characters of a text that are compared as one
MOST_BLOCKS = 64  # of one text
MOST_KNOWN = 100_000  # blocks that are remembered, over all texts


class Prefixes:
    """Which replica has seen which beginnings of texts; the oldest are forgotten."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, Any] = OrderedDict()

    def find(self, blocks: list[int], among: Any) -> Any:
        """The one among `among` that has seen the longest beginning; None where none of them has seen any."""
        return next((self._seen[block] for block in reversed(blocks) if self._seen.get(block) in among), None)

    def add(self, blocks: list[int], replica: Any) -> None:
        """`replica` sees a text."""
        for block in blocks:
            self._seen[block] = replica
            self._seen.move_to_end(block)
        while len(self._seen) > MOST_KNOWN:
            self._seen.popitem(last=False)


def blocks_of(body: bytes, key: bytes = b"") -> list[int]:
    """Hashes of the beginnings of a request's text, the shortest first; none for what is no request for text.

    Args:
        body: of the request.
        key: whose it is; texts of different keys and users begin differently.
    """
    try:
        asked = json.loads(body)
        texts = [f"{asked.get('user')}\n"]
        if "messages" in asked:
            texts += [f"{message['role']}:{message['content']}\n" for message in asked["messages"]]
        else:
            texts.append(str(asked["prompt"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    text, found, chain = "".join(texts), [], hash(key)
    for at in islice(range(0, len(text) - BLOCK + 1, BLOCK), MOST_BLOCKS):
        chain = hash((chain, text[at : at + BLOCK]))
        found.append(chain)
    return found
