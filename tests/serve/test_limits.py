"""Refuse other hosts and an empty variable for keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from serve_driver import serving

from draftree.cli.serve import hosts_for
from draftree.serve.settings import KEYS, ServerSettings, host_of, keys_of

Refused = Callable[[Sequence[str], str], None]


def test_a_variable_for_keys_that_holds_none_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", " , "):
        monkeypatch.setenv(KEYS, value)
        refused(["serve", "--port", "0"], f"{KEYS} is set and holds no key")
        refused(["serve", "--port", "0", "--api-key", "one"], f"{KEYS} is set and holds no key")
    monkeypatch.delenv(KEYS)
    assert keys_of(["one"]) == ("one",)


def test_only_the_named_hosts_are_answered(demo: Any) -> None:
    with serving(*demo, allowed_hosts=hosts_for("127.0.0.1", ["Models.example"], ())) as server:
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "models.example", "MODELS.example:443"):
            assert server.http.get("/health", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "evil.example:8000", ""):
            for path in ("/", "/health", "/v1/models"):
                answer = server.http.get(path, headers={"Host": host})
                assert answer.status_code == 421
                assert "--allowed-host" in answer.json()["error"]["message"]


def test_which_hosts_are_allowed() -> None:
    assert hosts_for("127.0.0.1", (), ()) == ("localhost", "127.0.0.1", "::1", "127.0.0.1")
    assert hosts_for("127.0.0.1", (), ("key",)) == hosts_for("0.0.0.0", (), ()) == ()
    assert "a.example" in hosts_for("0.0.0.0", ["a.example"], ("key",))
    assert ServerSettings().allowed_hosts == ()
    assert host_of("[::1]") == host_of("[::1]:80") == host_of("::1") == "::1"
