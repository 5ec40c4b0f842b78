"""A client of several servers of one model: an answer whose server fails is finished by another, token for token.

A broken stream is resumed by the prompt and the tokens received so far. The second server goes on with the same seed
from the place where the first one stopped, so that the answer is the one that a single server would have given.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

DEFAULT_TOKENS = 128
BUSY = (429, 500, 502, 503, 504)  # another server may be able to answer


class ServerError(RuntimeError):
    """No server gave an answer; the last one's reason."""


@dataclass(slots=True)
class Piece:
    """What a stream brought: text, and the ids of the tokens that it is of."""

    text: str
    token_ids: list[int]


@dataclass(slots=True)
class Answer:
    """A whole answer.

    Attributes:
        text: all of it.
        token_ids: its tokens.
        finish_reason: "stop" or "length".
        resumed: how often another server, or the same one again, went on with it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    resumed: int = 0


class Client:
    """Asks one of several servers, and goes on with the next where one fails.

    Args:
        urls: of the servers, without /v1. All must serve the same model.
        api_key: for servers with keys.
        timeout: seconds without a byte after which a server counts as failed.
        attempts: how often in a row no server may answer; between two rounds the client waits.
    """

    def __init__(
        self, urls: str | Sequence[str], api_key: str | None = None, timeout: float = 60.0, attempts: int = 5
    ) -> None:
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise ValueError("The client has no server: give at least one URL.")
        self.attempts = attempts
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(headers=headers, timeout=timeout)
        self._next = random.randrange(len(self.urls))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def complete(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]], **fields: Any) -> Answer:
        """The whole answer; see `stream`."""
        answer = Answer()
        for _ in self.stream(prompt, answer, **fields):
            pass
        return answer

    def stream(
        self, prompt: str | Sequence[int] | Sequence[dict[str, Any]], answer: Answer | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """An answer, piece by piece.

        Args:
            prompt: a text, token ids, or the messages of a chat.
            answer: is filled while the pieces come.
            fields: of /v1/completions, without those of several answers and of an answer that begins with its prompt;
                None is as good as left out. Without a seed one is drawn, so that a resumed answer goes on as it began.

        Raises:
            ValueError: `n`, `best_of` or `echo`; what a server refuses (status 4xx), in its words.
            ServerError: no server answers.
        """
        fields = {name: value for name, value in fields.items() if value is not None}
        for name, harmless in (("n", 1), ("best_of", 1), ("echo", False)):
            if fields.pop(name, harmless) != harmless:
                raise ValueError(f"The client gives one answer, without its prompt: leave {name} out.")
        answer = Answer() if answer is None else answer
        return self._pieces(prompt, answer, {"seed": random.getrandbits(62), "max_tokens": DEFAULT_TOKENS} | fields)

    def _pieces(self, prompt: Any, answer: Answer, fields: dict[str, Any]) -> Iterator[Piece]:
        """See `stream`; checked."""
        if isinstance(prompt, str) or (len(prompt) and not isinstance(prompt[0], int)):
            asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
            if "add_special_tokens" in fields:
                asked["add_special_tokens"] = fields.pop("add_special_tokens")
            prompt = self._tokenized(asked)
        ids, failures = list(prompt), 0
        while answer.finish_reason is None:
            before = len(answer.token_ids)
            try:
                yield from self._part(ids, answer, fields)
            except (httpx.HTTPError, ServerError) as error:
                failures = 1 if len(answer.token_ids) > before else failures + 1
                if failures > self.attempts * len(self.urls):
                    raise ServerError(f"No server answers; the last one said: {error}") from error
                answer.resumed += 1
                self._wait(failures)

    def _part(self, ids: list[int], answer: Answer, fields: dict[str, Any]) -> Iterator[Piece]:
        """One server's part of an answer."""
        done = len(answer.token_ids)
        if done and done >= fields["max_tokens"]:  # it broke between the last token and its end
            answer.finish_reason = "length"
            return
        own = {"max_tokens": fields["max_tokens"] - done, "stream": True, "return_token_ids": True}
        own["draftree"] = dict(fields.get("draftree") or {}) | {"resumed_tokens": done}
        body = fields | own | {"prompt": [*ids, *answer.token_ids]}
        with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                _raise(response)
            for event in _events(response):
                if "error" in event:
                    own_fault = event["error"].get("type") == "invalid_request_error"
                    raise (ValueError if own_fault else ServerError)(event["error"]["message"])
                for choice in event["choices"]:
                    answer.text += choice["text"]
                    answer.token_ids += choice["token_ids"]
                    answer.finish_reason = choice["finish_reason"]
                    yield Piece(choice["text"], choice["token_ids"])
        if answer.finish_reason is None:
            raise ServerError("the stream ended before the answer did")

    def _tokenized(self, body: dict[str, Any]) -> list[int]:
        for failures in range(1, self.attempts * len(self.urls) + 1):
            try:
                response = self._http.post(f"{self._url}/tokenize", json=body)
                if response.status_code == 200:
                    found: list[int] = response.json()["tokens"]
                    return found
                _raise(response)
            except (httpx.HTTPError, ServerError) as error:
                last: Exception = error
                self._wait(failures)
        raise ServerError(f"No server answers; the last one said: {last}") from last

    @property
    def _url(self) -> str:
        return self.urls[self._next % len(self.urls)]

    def _wait(self, failures: int) -> None:
        """Turn to the next server; after a round in which none answered, wait a little longer each time."""
        self._next += 1
        if failures % len(self.urls) == 0:
            time.sleep(min(5.0, 0.1 * 2 ** (failures // len(self.urls))))


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream but for [DONE]; one without the end of its line was cut off, and is left out.

    httpx's own lines end at characters that may be in a text, such as U+2028, as well.
    """
    rest = b""
    for chunk in response.iter_bytes():
        *lines, rest = re.split(rb"[\r\n]", rest + chunk)
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _raise(response: httpx.Response) -> None:
    """Raise what a response without an answer means."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    raise ServerError(message) if response.status_code in BUSY else ValueError(message)
