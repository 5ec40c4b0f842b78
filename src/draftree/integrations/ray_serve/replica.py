"""One replica: the application of `draftree serve` in an actor, called with requests and yielding its messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.integrations.ray_serve.front import HttpRequest
from draftree.integrations.ray_serve.prefixes import Beginnings
from draftree.serve.launch import Launch
from draftree.serve.output import RequestOutput

MOST_LEARNED = 10_000  # answers that wait to be told to other replicas


class Replica:
    """Answers requests with an engine of its own.

    Args:
        launch: how the application is made.
        exchange: whether answers are kept for other replicas' tries.
    """

    def __init__(self, launch: Launch, *, exchange: bool) -> None:
        self.app = launch.app()
        self.server = self.app.state.server
        self.name = serve.get_replica_context().replica_id.unique_id
        self._learned: deque[tuple[str | None, list[int]]] = deque(maxlen=MOST_LEARNED)
        if exchange and parts_of(self.server.engine.config.drafter, Lookahead):
            self.server.worker.on_end.append(self._keep)

    async def answer(
        self, request: HttpRequest, text: Beginnings | None = None, replica: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The messages of the response, as in ASGI. A caller that stops reading ends the answer.

        Args:
            request: as it came to the front.
            text, replica: for the router.
        """
        messages: asyncio.Queue[Any] = asyncio.Queue()
        gone, read = asyncio.Event(), False

        async def receive() -> Any:
            nonlocal read
            if not read:
                read = True
                return {"type": "http.request", "body": request.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
        }
        scope |= {"method": request.method, "path": request.path, "raw_path": request.path.encode(), "root_path": ""}
        scope |= {"query_string": request.query, "headers": request.headers, "scheme": "http", "client": None}
        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait({"type": "over"}))
        try:
            while (message := await messages.get())["type"] != "over":
                yield message
        finally:
            gone.set()
            task.cancel()

    async def about(self, replica: int) -> dict[str, Any]:
        """This replica's name, and its metrics as Prometheus reads them."""
        return {"name": self.name, "metrics": self.server.metrics.text().decode()}

    async def learned(self, replica: int) -> tuple[str, list[tuple[str | None, list[int]]]]:
        """This replica's name, and the answers since the last call: (cache_salt, token ids)."""
        found = list(self._learned)
        self._learned.clear()
        return self.name, found

    async def learn(self, answers: list[tuple[str | None, list[int]]], replica: int) -> None:
        """Put other replicas' answers into the tries."""

        def warm() -> None:
            for trie in parts_of(self.server.engine.config.drafter, Lookahead):
                for cache_salt, tokens in answers:
                    trie.warm([tokens], cache_salt)

        await asyncio.to_thread(warm)

    def check_health(self) -> None:
        """Raises where the engine's thread has ended, so that Ray starts another replica."""
        if not self.server.worker.alive:
            raise RuntimeError("The engine's thread has ended.")

    def _keep(self, part: RequestOutput) -> None:
        if part.request is not None and part.request.tokens:
            self._learned.append((part.request.params.cache_salt, list(part.request.tokens)))
