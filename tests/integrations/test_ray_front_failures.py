"""What the front says where a replica dies while all of them are asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from test_ray_front import WHOLE, Replicas, ask, body

from draftree.integrations.ray_serve.front import Front


@pytest.mark.parametrize("path", ["/metrics", "/v1/corpus"])
def test_the_client_is_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(_: Front) -> AsyncIterator[Any]:
        raise RuntimeError("it died")
        yield

    monkeypatch.setattr(Front, "_numbers", dies)
    begin, end = ask(Replicas([WHOLE, body(b"")]), path)
    assert begin["status"] == 503
    assert json.loads(end["body"])["error"]["code"] == "replica_failed"
