"""Refuse long texts, other hosts and an empty variable for keys, and describe the refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from serve_driver import Running, serving

from draftree.cli.serve import hosts_for
from draftree.serve.calls import CallReader, longest_token
from draftree.serve.settings import KEYS, ServerSettings, host_of, keys_of

Refused = Callable[[Sequence[str], str], None]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "{}"}, "prompt"),
        ("/v1/completions", {"prompt": ["Hi", "{}"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{}"}]}, "messages"),
        ("/tokenize", {"prompt": "{}"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "{}"}]}, "messages"),
    ],
)
def test_texts_that_no_context_holds_are_refused_before_they_are_tokenised(
    server: Running, demo: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str
) -> None:
    longest = longest_token(demo.tokenizer)
    assert longest >= max(len(demo.tokenizer.decode([token]).encode()) for token in range(len(demo.tokenizer)))
    text = "x" * (longest * 2048 + 1)

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(part) for name, part in value.items()}
        return [filled(part) for part in value] if isinstance(value, list) else value.replace("{}", text)

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("it was tokenised")

    if path != "/v1/completions":  # whose first prompts may be
        monkeypatch.setattr(CallReader, "encode", never)
    refused = server.post(path, **filled(body))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"have at most {longest * 2048}" in error["message"]


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


def test_the_description_names_what_requests_are_refused_with(server: Running) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]

    def told(method: str, path: str) -> set[int]:
        return {int(status) for status in paths[path][method]["responses"]}

    answers = [told("post", path) for path in ("/v1/completions", "/v1/chat/completions", "/v1/corpus", "/tokenize")]
    assert all({200, 400, 401, 404, 413, 429, 503} <= found for found in answers)
    assert {200, 401} <= told("get", "/v1/models") & told("get", "/metrics")
    assert {200, 401, 404} <= told("get", "/v1/models/{name}")
    assert {200, 503} <= told("get", "/health")
    assert not any(422 in told(method, path) for path, methods in paths.items() for method in methods)
    assert "text/event-stream" in paths["/v1/completions"]["post"]["responses"]["200"]["content"]
    kind = server.http.get("/metrics").headers["content-type"].partition(";")[0]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == [kind]
    for path, body in (("/v1/completions", {"prompt": 1}), ("/v1/completions", {"prompt": "a", "model": "no"})):
        refused = server.post(path, **body)
        assert refused.status_code in told("post", path)
