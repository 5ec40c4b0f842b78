"""The door to the replicas: passes requests on by the beginnings of their texts, and says clearly when one fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse

from draftree.integrations.ray_serve.prefixes import Beginnings, beginnings_of
from draftree.serve.http import ApiError, GoneError
from draftree.serve.server import while_there, whole_body
from draftree.serve.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("draftree.ray")
FAILED = ApiError(
    "The replica that answered this request has failed: send it again, with what has come so far to go on from there.",
    status=503,
    code="replica_failed",
    retry_after=1,
)
BY_PREFIX = ("/v1/chat/completions", "/v1/completions")
TO_ALL = ("/v1/corpus",)
MOST_REPLICAS = 1000
CATCH_UP = 5.0  # seconds after which a new replica is looked for, where there are texts to tell it
MOST_TEXTS = 64 * 2**20  # bytes of the texts that are kept for new replicas; the oldest go first


@dataclass(frozen=True)
class HttpRequest:
    """A request as it travels from the front to a replica; fields as in ASGI's scope."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Front:
    """An ASGI application over a handle of replicas.

    Args:
        replicas: their handle.
        settings: of each replica; those about bodies hold here.
        exchange: seconds between two exchanges of what tries learned; None for none.
    """

    def __init__(self, replicas: DeploymentHandle, settings: ServerSettings, exchange: float | None) -> None:
        self._replicas, self._settings, self._exchange = replicas, settings, exchange
        self._exchanging: asyncio.Task[None] | None = None
        self._texts: deque[HttpRequest] = deque()  # which all replicas there were have taken
        self._kept = 0  # bytes of these
        self._informed: set[str] = set()  # replicas that have them all
        self._telling = asyncio.Lock()
        self._catching_up: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            return
        if self._exchange is not None and self._exchanging is None:
            self._exchanging = asyncio.ensure_future(_again(self._exchange, self.exchange))
        client = Request(scope, receive)
        try:
            body = await whole_body(client, self._settings)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)
            return
        request = HttpRequest(scope["method"], scope["path"], scope["query_string"], list(scope["headers"]), body)
        if request.path == "/metrics":
            messages = _or_refused(self._metrics(request))
        elif request.path in TO_ALL:
            messages = _or_refused(self._to_all(request))
        else:
            key = dict(request.headers).get(b"authorization", b"")
            messages = self._from_one(request, beginnings_of(body, key) if request.path in BY_PREFIX else None)
        with suppress(GoneError):
            await while_there(client, _pass_on(messages, send))

    async def _from_one(
        self, request: HttpRequest, text: Beginnings | None, replica: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The response of one replica. Where it fails before its first word, another one gets the request."""
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
        """Every replica gets the request; the response is the first that refuses it, or else any."""
        first: list[dict[str, Any]] = []
        names = set()
        async with self._telling:
            await self._inform_new()
            async for number, name in self._numbers():
                found = [message async for message in self._from_one(request, None, number)]
                if not first or found[0]["status"] >= 400:
                    first = found
                if found[0]["status"] >= 400:
                    break
                names.add(name)
            if first and first[0]["status"] < 400:
                self._keep(request, names)
        for message in first:
            yield message

    def _keep(self, request: HttpRequest, names: set[str]) -> None:
        """Keep texts that the replicas `names` have taken, for those that start later."""
        self._informed = self._informed & names if self._texts else names
        self._texts.append(request)
        self._kept += len(request.body)
        while self._kept > MOST_TEXTS:
            self._kept -= len(self._texts.popleft().body)
        if self._catching_up is None:
            self._catching_up = asyncio.ensure_future(_again(CATCH_UP, self.catch_up))

    async def catch_up(self) -> None:
        """Tell replicas that have started since the first texts came all that are kept."""
        async with self._telling:
            await self._inform_new()

    async def _inform_new(self) -> None:
        there = set()
        async for number, name in self._numbers():
            there.add(name)
            if name not in self._informed and await self._inform(number):
                self._informed.add(name)
        self._informed &= there

    async def _inform(self, number: int) -> bool:
        """Whether replica `number` has taken all texts that are kept; else it is told them again later."""
        for request in self._texts:
            found = [message async for message in self._from_one(request, None, number)]
            if found[0]["status"] >= 400:
                log.warning("a new replica has not taken the texts that others have: %d", found[0]["status"])
                return False
        return True

    async def _metrics(self, request: HttpRequest) -> AsyncIterator[dict[str, Any]]:
        """Metrics of all replicas, each with its name as the label `replica`."""
        allowed = [message async for message in self._from_one(request, None)]
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
        """0, 1, ... of the replicas that are there now, and their names."""
        seen: set[str] = set()
        for number in range(MOST_REPLICAS):
            name = (await self._replicas.about.remote(replica=number))["name"]
            if name in seen:
                return
            seen.add(name)
            yield number, name

    async def exchange(self) -> None:
        """Tell every replica what the others answered since the last time."""
        found = {}
        async for number, _ in self._numbers():
            name, answers = await self._replicas.learned.remote(replica=number)
            found[name] = (number, answers)
        for name, (number, _) in found.items():
            others = [answer for other, (_, answers) in found.items() if other != name for answer in answers]
            if others:
                await self._replicas.learn.remote(others, replica=number)


def _refusal() -> list[dict[str, Any]]:
    """The messages of a response that says that a replica has failed."""
    made = JSONResponse(FAILED.body(), FAILED.status, FAILED.headers())
    begin = {"type": "http.response.start", "status": FAILED.status, "headers": made.raw_headers}
    return [begin, {"type": "http.response.body", "body": made.body}]


async def _or_refused(messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """The messages of a response that all replicas have a part in, which begins when all have done theirs."""
    try:
        async for message in messages:
            yield message
    except Exception as error:
        log.warning("a replica failed: %s", type(error).__name__)
        for message in _refusal():
            yield message


async def _again(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do it from time to time."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception as error:  # a replica that fails; the next time another stands in its place
            log.warning("replicas could not be told what others know: %s", type(error).__name__)


def labelled(texts: dict[str, str]) -> bytes:
    """Prometheus texts of several replicas as one, with the label `replica`."""
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
