"""Which replica gets a request: the one that has answered the beginning of its text before, unless it is too busy.

A dialogue so meets the keys and values of its earlier turns, and the trie that learned from them.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from draftree.integrations.ray_serve.prefixes import Beginnings, Prefixes


class PrefixRouter(RequestRouter):
    """Routes calls by `text`, their `Beginnings`.

    A call with a number as `replica` goes to that one of all, in the order of their names.
    """

    def initialize_state(self, slack: int = 8, **_: Any) -> None:
        """See `RequestRouter`.

        Args:
            slack: how many requests more than the least busy one a replica may have and still get those it knows.
        """
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
        order = random.sample(list(by_name), len(by_name))  # of several that are as busy, any
        order.sort(key=self._busy.__getitem__)
        known = self._prefixes.find(given.get("text") or Beginnings([]), by_name)
        if known is not None and self._busy[known] <= self._busy[order[0]] + self._slack:
            order.sort(key=lambda replica: replica != known)
        return [[by_name[replica]] for replica in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See `RequestRouter`."""
        self._busy[replica_id] += 1
        self._prefixes.add(pending_request.kwargs.get("text") or Beginnings([]), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        self._busy[replica_id] = max(0, self._busy[replica_id] - 1)
