"""Beginnings of texts, and which replica has seen which of them."""

from __future__ import annotations

import json
from collections import OrderedDict
from itertools import islice
from typing import Any, NamedTuple

BLOCK = 64  # characters of a text that are compared as one
MOST_BLOCKS = 64  # of one text
MOST_KNOWN = 100_000  # blocks that are remembered, over all texts


class Beginnings(NamedTuple):
    """Where a text can be told from others."""

    hashes: list[int]  # of its beginnings, the shortest first
    enough: int = 1  # how many of them a replica must have seen to be worth the way


class Prefixes:
    """Which replica has seen which beginnings of texts; the oldest are forgotten."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, Any] = OrderedDict()

    def find(self, text: Beginnings, among: Any) -> Any:
        """The one among `among` that has seen the longest beginning; None where none has seen enough."""
        telling = reversed(text.hashes[text.enough - 1 :])
        return next((self._seen[one] for one in telling if self._seen.get(one) in among), None)

    def add(self, text: Beginnings, replica: Any) -> None:
        """`replica` sees a text."""
        for one in text.hashes:
            self._seen[one] = replica
            self._seen.move_to_end(one)
        while len(self._seen) > MOST_KNOWN:
            self._seen.popitem(last=False)


def beginnings_of(body: bytes, key: bytes = b"") -> Beginnings:
    """How a request's text begins; without hashes for what is no request for text.

    A chat is told by its messages, the first user's and all before it together: what many chats begin with alike, such
    as a system prompt, tells nothing. Other texts are told by blocks of characters, of which half is enough.

    Args:
        body: of the request.
        key: whose it is; texts of different keys and users begin differently.
    """
    try:
        asked = json.loads(body)
        parts = _messages(asked["messages"]) if "messages" in asked else _blocks(asked["prompt"])
        chain, found = hash((key, str(asked.get("user")))), []
        for part in islice(parts, MOST_BLOCKS):
            chain = hash((chain, part))
            found.append(chain)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Beginnings([])
    return Beginnings(found, 1 if "messages" in asked else max(1, (len(found) + 1) // 2))


def _messages(messages: list[dict[str, Any]]) -> list[str]:
    texts = [f"{message['role']}:{message.get('content')}" for message in messages]
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    return ["\n".join(texts[: first + 1]), *texts[first + 1 :]]


def _blocks(prompt: Any) -> list[str]:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return [text[at : at + BLOCK] for at in range(0, len(text) - BLOCK + 1, BLOCK)]
