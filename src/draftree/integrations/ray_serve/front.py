"""Route requests to replicas by the beginnings of their texts, and report failed replicas."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse

from draftree.serve.http import ApiError, GoneError
from draftree.serve.server import while_there, whole_body
from draftree.serve.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("draftree.ray")
FAILED = ApiError(
    "The replica of this request has failed: send the request again.",
    status=503,
    code="replica_failed",
    retry_after=1,
)
BY_PREFIX = ("/v1/chat/completions", "/v1/completions")
MOST_REPLICAS = 1000
BLOCK = 64  # Characters of a prompt that are hashed together.
MOST_PARTS = 64  # Hashed messages or blocks of one text.
MOST_KNOWN = 100_000  # Remembered hashes of all texts.


@dataclass(frozen=True)
class HttpRequest:
    """Carry a request from the front to a replica; fields as in ASGI's scope."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Front:
    """Pass requests on to replicas, as an ASGI application.

    Args:
        replicas: their handle.
        settings: of each replica; the limits of bodies apply here.
    """

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
        request = HttpRequest(scope["method"], scope["path"], scope["query_string"], list(scope["headers"]), body)
        if request.path == "/metrics":
            messages = _or_refused(self._metrics(request))
        elif request.path == "/v1/corpus":
            messages = _or_refused(self._to_all(request))
        else:
            key = dict(request.headers).get(b"authorization", b"")
            messages = self._from_one(request, beginnings_of(body, key) if request.path in BY_PREFIX else ())
        with suppress(GoneError):
            await while_there(client, _pass_on(messages, send))

    async def _from_one(
        self, request: HttpRequest, text: Sequence[int] = (), replica: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the response of one replica; if that fails before its first message, of another one."""
        for last in (False, True):
            started = stream = False
            response: Any = self._replicas.options(stream=True).answer.remote(request, text=text, replica=replica)
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
                if started and not stream:
                    raise
                if started:
                    event = f"data: {json.dumps(FAILED.body())}\n\n".encode()
                    yield {"type": "http.response.body", "body": event, "more_body": False}
                    return
                if last:
                    for message in _refusal():
                        yield message

    async def _to_all(self, request: HttpRequest) -> AsyncIterator[dict[str, Any]]:
        """Send the request to each replica that runs now; yield the first refusal, or else any response."""
        first: list[dict[str, Any]] = []
        async for number, _ in self._numbers():
            found = [message async for message in self._from_one(request, replica=number)]
            if not first or found[0]["status"] >= 400:
                first = found
            if found[0]["status"] >= 400:
                break
        for message in first:
            yield message

    async def _metrics(self, request: HttpRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield the metrics of all replicas, with their names as the label `replica`."""
        allowed = [message async for message in self._from_one(request)]
        if allowed[0]["status"] != 200:
            for message in allowed:
                yield message
            return
        texts = {}
        async for number, _ in self._numbers():
            about = await self._replicas.about.remote(replica=number)
            texts[about["name"]] = about["metrics"]
        body, headers = labelled(texts), [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        yield {"type": "http.response.start", "status": 200, "headers": headers}
        yield {"type": "http.response.body", "body": body, "more_body": False}

    async def _numbers(self) -> AsyncIterator[tuple[int, str]]:
        """Yield the number and the name of each running replica."""
        seen: set[str] = set()
        for number in range(MOST_REPLICAS):
            name = (await self._replicas.about.remote(replica=number))["name"]
            if name in seen:
                return
            seen.add(name)
            yield number, name


def _refusal() -> list[dict[str, Any]]:
    """Return the response that reports a failed replica."""
    made = JSONResponse(FAILED.body(), FAILED.status, FAILED.headers())
    begin = {"type": "http.response.start", "status": FAILED.status, "headers": made.raw_headers}
    return [begin, {"type": "http.response.body", "body": made.body}]


async def _or_refused(messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages, or the report of a failed replica."""
    try:
        async for message in messages:
            yield message
    except Exception as error:
        log.warning("a replica failed: %s", type(error).__name__)
        for message in _refusal():
            yield message


def labelled(texts: dict[str, str]) -> bytes:
    """Join Prometheus texts of several replicas, with the label `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            held = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            held.samples += [sample._replace(labels=sample.labels | {"replica": name}) for sample in family.samples]
    together: Any = SimpleNamespace(collect=families.values)
    return generate_latest(together)


async def _pass_on(messages: AsyncIterator[dict[str, Any]], send: Any) -> None:
    async for message in messages:
        await send(message)


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

    Args:
        body: body of the request.
        key: API key; texts of different keys and users have different hashes.
    """
    try:
        asked = json.loads(body)
        parts = _messages(asked["messages"]) if "messages" in asked else _blocks(asked["prompt"])
        chain, found = hash((key, str(asked.get("user")))), []
        for part in parts[:MOST_PARTS]:
            chain = hash((chain, part))
            found.append(chain)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    return found


def _messages(messages: list[dict[str, Any]]) -> list[str]:
    texts = [f"{message['role']}:{message.get('content')}" for message in messages]
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    return ["\n".join(texts[: first + 1]), *texts[first + 1 :]]


def _blocks(prompt: Any) -> list[str]:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return [text[at : at + BLOCK] for at in range(0, len(text) - BLOCK + 1, BLOCK)]
