"""Route requests to replicas by the beginnings of their texts, and report failed replicas."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse

from draftree.serve.server import while_there, whole_body
from draftree.serve.settings import ApiError, GoneError, ServerSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("draftree.ray")
MESSAGE = "The replica of this request has failed: send the request again."
FAILED = ApiError(MESSAGE, status=503, code="replica_failed", retry_after=1)
BY_PREFIX = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MOST_REPLICAS = 1000
BLOCK = 64  # Characters of a prompt that are hashed together.
MOST_PARTS = 64  # Hashed messages or blocks of one text.
MOST_KNOWN = 100_000  # Remembered hashes of all texts.


class Front:
    """Pass requests on to replicas, as an ASGI application."""

    def __init__(self, replicas: DeploymentHandle, settings: ServerSettings) -> None:
        self._replicas, self._settings = replicas, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            return
        client = Request(scope, receive)
        try:
            body = await whole_body(client, self._settings)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)
            return
        path, headers = scope["path"], list(scope["headers"])
        request = {"method": scope["method"], "path": path, "query_string": scope["query_string"], "headers": headers}
        key = dict(headers).get(b"authorization", b"")
        if path == "/metrics":
            messages = self._metrics(key.decode("latin-1"))
        elif path == "/v1/corpus":
            messages = self._to_all(request, body)
        else:
            messages = self._from_one(request, body, beginnings_of(body, key) if path in BY_PREFIX else ())
        with suppress(GoneError):
            await while_there(client, _send_all(messages, send))

    async def _from_one(
        self, request: dict[str, Any], body: bytes, text: Sequence[int] = (), replica: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the response of one replica; if that fails before its first message, of another one."""
        for last in (False, True):
            started = stream = False
            answer = self._replicas.options(stream=True).answer
            response: Any = answer.remote(request, body, text=text, replica=replica)
            try:
                async for message in response:
                    if message["type"] == "http.response.start":
                        stream = any(b"event-stream" in value for _, value in message["headers"])
                        started = True
                    yield message
                return
            except asyncio.CancelledError:
                response.cancel()
                raise
            except Exception as error:
                log.warning("a replica failed: %s", type(error).__name__)
                if stream:
                    event = f"data: {json.dumps(FAILED.body())}\n\n".encode()
                    yield {"type": "http.response.body", "body": event, "more_body": False}
                    return
                if started or last:
                    raise

    async def _to_all(self, request: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Send the request to each running replica; yield the first refusal, or else the last response."""
        found: list[dict[str, Any]] = []
        async for number, _ in self._running():
            found = [message async for message in self._from_one(request, body, replica=number)]
            if found[0]["status"] >= 400:
                break
        for message in found:
            yield message

    async def _metrics(self, authorization: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the metrics of all replicas, with their names as the label `replica`."""
        self._settings.check_key(authorization)
        texts = {about["name"]: about["metrics"] async for _, about in self._running()}
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        yield {"type": "http.response.start", "status": 200, "headers": headers}
        yield {"type": "http.response.body", "body": labelled(texts), "more_body": False}

    async def _running(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each running replica, and its name and metrics."""
        seen: set[str] = set()
        for number in range(MOST_REPLICAS):
            about = await self._replicas.about.remote(replica=number)
            if about["name"] in seen:
                return
            seen.add(about["name"])
            yield number, about


async def _send_all(messages: AsyncIterator[dict[str, Any]], send: Any) -> None:
    """Send the messages; a failure before the first one is answered by an error."""
    begun = False
    try:
        async for message in messages:
            begun = True
            await send(message)
    except Exception as error:
        if begun:
            raise
        refusal = error if isinstance(error, ApiError) else FAILED
        made = JSONResponse(refusal.body(), refusal.status, refusal.headers())
        await send({"type": "http.response.start", "status": made.status_code, "headers": made.raw_headers})
        await send({"type": "http.response.body", "body": made.body})


def labelled(texts: dict[str, str]) -> bytes:
    """Join Prometheus texts of several replicas, with the label `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            held = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            held.samples += [sample._replace(labels=sample.labels | {"replica": name}) for sample in family.samples]
    together: Any = SimpleNamespace(collect=families.values)
    return generate_latest(together)


class Prefixes:
    """Remember the replica of each beginning of a text; drop the oldest ones."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, Any] = OrderedDict()

    def find(self, hashes: Sequence[int], among: Any) -> Any:
        """Return the replica in `among` that has seen the longest beginning; None for none."""
        return next((self._seen[one] for one in reversed(hashes) if self._seen.get(one) in among), None)

    def add(self, hashes: Sequence[int], replica: Any) -> None:
        """Record that `replica` has seen a text."""
        for one in hashes:
            self._seen[one] = replica
            self._seen.move_to_end(one)
        while len(self._seen) > MOST_KNOWN:
            self._seen.popitem(last=False)


def beginnings_of(body: bytes, key: bytes = b"") -> list[int]:
    """Return the hashes of the beginnings of a request's text, the shortest first; none for other requests.

    A chat is hashed by messages. The first user message and all before it count as one, because many chats share a
    system prompt. Other prompts are hashed by blocks of characters.
    """
    try:
        asked = json.loads(body)
        given = asked.get("messages") or asked.get("input") or asked["prompt"]
        parts = _messages(given) if given and isinstance(given, list) and isinstance(given[0], dict) else _blocks(given)
        chain, found = hash((key, str(asked.get("user")))), []
        for part in parts[:MOST_PARTS]:
            chain = hash((chain, part))
            found.append(chain)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    return found


def _messages(messages: list[dict[str, Any]]) -> list[str]:
    texts = [f"{message.get('role')}:{message.get('content') or message}" for message in messages]
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
    return ["\n".join(texts[: first + 1]), *texts[first + 1 :]]


def _blocks(prompt: Any) -> list[str]:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return [text[at : at + BLOCK] for at in range(0, len(text) - BLOCK + 1, BLOCK)]
