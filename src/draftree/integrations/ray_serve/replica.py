"""Run the application of `draftree serve` in a Ray actor, and route requests to such replicas.

A dialogue is routed to the replica with the keys and values of its earlier turns, unless that replica is too busy.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray import serve
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from draftree.integrations.ray_serve.front import Prefixes
from draftree.serve.app import Launch


class Replica:
    """Answer requests with an engine of its own."""

    def __init__(self, launch: Launch) -> None:
        self.app = launch.app()
        self.server = self.app.state.server
        self.name = serve.get_replica_context().replica_id.unique_id

    async def answer(
        self, request: dict[str, Any], body: bytes, text: Sequence[int] = (), replica: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the ASGI messages of the response; a caller that stops reading ends the request."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        closed, read = asyncio.Event(), False

        async def receive() -> Any:
            nonlocal read
            if not read:
                read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await closed.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "client": None}
        task = asyncio.ensure_future(self.app(scope | {"root_path": ""} | request, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait({"type": "over"}))
        try:
            while (message := await messages.get())["type"] != "over":
                yield message
        finally:
            closed.set()
            task.cancel()

    async def about(self, replica: int) -> dict[str, Any]:
        """Return this replica's name and its metrics for Prometheus."""
        return {"name": self.name, "metrics": self.server.metrics.text().decode()}

    def check_health(self) -> None:
        """Raise an error if the engine's thread has ended, so that Ray starts another replica."""
        if not self.server.worker.alive:
            raise RuntimeError("The engine's thread has ended.")


class PrefixRouter(RequestRouter):
    """Route calls by `text`, see `beginnings_of`; `replica` is the number of a replica in the order of names."""

    def initialize_state(self, slack: int = 8, **_: Any) -> None:
        """See `RequestRouter`."""
        self._prefixes, self._busy, self._slack = Prefixes(), Counter[ReplicaID](), slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`."""
        given = {} if pending_request is None else pending_request.kwargs
        by_name = {r.replica_id: r for r in sorted(candidate_replicas, key=lambda r: str(r.replica_id.unique_id))}
        if not by_name:
            return []
        number = given.get("replica")
        if number is not None:
            return [[list(by_name.values())[number % len(by_name)]]]
        order = random.sample(list(by_name), len(by_name))  # Ties are broken at random.
        order.sort(key=self._busy.__getitem__)
        known = self._prefixes.find(given.get("text", ()), by_name)
        if known is not None and self._busy[known] <= self._busy[order[0]] + self._slack:
            order.sort(key=lambda replica: replica != known)
        return [[by_name[replica]] for replica in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See `RequestRouter`."""
        self._busy[replica_id] += 1
        self._prefixes.add(pending_request.kwargs.get("text", ()), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        self._busy[replica_id] = max(0, self._busy[replica_id] - 1)
