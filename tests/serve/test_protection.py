"""Keys, hosts, limits, disconnecting clients, shutdown, and the check before replicas start."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from serve_driver import Running, serving
from zoo import build

from draftree import Fixed
from draftree.cli.serve import hosts_for
from draftree.drafting import Lookahead
from draftree.serve import app as launch
from draftree.serve import responses as answers
from draftree.serve.app import Launch
from draftree.serve.settings import KEYS, ServerSettings, host_of, keys_of


def test_keys_admit_and_separate_requests(demo: Any) -> None:
    with serving(*demo, shape=Fixed(8), api_keys=("first", "second")) as server:  # Times of steps do not matter.
        assert server.http.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
            refused = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert server.http.get("/metrics", headers=headers).status_code == 401

        def ask(key: str) -> dict[str, Any]:
            body = {
                "prompt": "The sea is so wide that",
                "temperature": 0,
                "max_tokens": 30,
                "draftree": {"stats": True},
            }
            answer = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            stats: dict[str, Any] = answer.json()["draftree"]["answers"][0]
            return stats

        one, stranger, again = ask("first"), ask("second"), ask("first")
        assert one["reused_prompt_tokens"] == stranger["reused_prompt_tokens"] == 0
        assert one["steps"] == stranger["steps"] > again["steps"]
        assert again["reused_prompt_tokens"] > 0


def test_the_openapi_description_needs_a_key(demo: Any) -> None:
    with serving(*demo, api_keys=("first",)) as server:
        for path in ("/docs", "/redoc"):
            assert server.http.get(path).status_code == 404
        assert server.http.get("/openapi.json").status_code == 401
        server.http.headers["Authorization"] = "Bearer first"
        found = [server.http.get("/openapi.json").json() for _ in range(2)]
    assert found[0] == found[1]
    written = json.dumps(found[0])
    led_to = set(re.findall(r'"#/components/schemas/([^"]+)"', written))
    assert {"ToolCall", "DraftreeOptions"} <= led_to <= set(found[0]["components"]["schemas"])
    assert "$defs" not in written
    assert found[0]["paths"]["/tokenize"]["post"]["requestBody"]


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="An API key is empty"):
        ServerSettings(api_keys=("good", " "))


def test_overload_is_refused_and_passes(demo: Any) -> None:
    with serving(*demo, slots=2, queue=3) as server:
        statuses: list[int] = []

        def ask() -> None:
            body = {"prompt": "The sea", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
            response = server.http.post("/v1/completions", json=body)
            statuses.append(response.status_code)
            if response.status_code == 429:
                assert 1 <= int(response.headers["retry-after"]) <= 60
                assert response.json()["error"]["code"] == "queue_full"

        server.worker._usual = 1e4  # Seconds of an output.
        threads = [threading.Thread(target=ask) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 5
        assert server.idle()
        assert server.complete("Hi")["choices"]


def test_an_incomplete_body_times_out(demo: Any) -> None:
    with serving(*demo, body_seconds=0.2) as server:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port), timeout=30) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            assert line.recv(100).startswith(b"HTTP/1.1 408 ")


def test_limits_of_length(demo: Any) -> None:
    with serving(*demo, max_prompt_tokens=20, max_output_tokens=10, max_body_bytes=2000) as server:
        assert len(server.complete([5] * 20, max_tokens=10, ignore_eos=True, return_token_ids=True)["choices"]) == 1
        assert server.post("/v1/completions", prompt=[5] * 21).status_code == 400
        assert server.post("/v1/completions", prompt=[5], max_tokens=11).status_code == 400
        chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], ignore_eos=True)
        assert chat.json()["usage"]["completion_tokens"] == 10
        assert server.post("/v1/completions", prompt="x" * 3000).status_code == 413


def test_time_is_bounded(demo: Any) -> None:
    with serving(*demo, timeout=0.2) as server:
        answer = server.complete("The sea", max_tokens=2000, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 2000
        assert server.idle()
        shorter = server.complete("The sea", max_tokens=2000, ignore_eos=True, draftree={"timeout": 0.02})
        assert shorter["usage"]["completion_tokens"] < answer["usage"]["completion_tokens"]
        longer = server.complete(
            "The sea", max_tokens=2000, ignore_eos=True, draftree={"timeout": 60, "drafter": "off"}
        )
        assert longer["usage"]["completion_tokens"] < 2000


def test_timeouts_in_the_queue_and_comments_in_silent_streams(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One output of slow steps holds the only slot."""
    monkeypatch.setattr(answers, "KEEP_ALIVE", 0.02)
    body = {"prompt": "The sea", "max_tokens": 2000, "ignore_eos": True}
    with serving(*demo, slots=1, timeout=60) as server:
        engine, path = server.worker.engine, f"{server.url}/v1/completions"
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.01), step()))
        with httpx.stream("POST", path, json=body | {"stream": True, "draftree": {"drafter": "off"}}) as first:
            lines = first.iter_lines()
            next(lines)
            for n in (1, 2):
                late = httpx.post(path, json=body | {"n": n, "draftree": {"timeout": 0.1}}, timeout=60)
                assert late.status_code == 503
                assert late.headers["retry-after"] == "1"
                assert "timed out in the queue" in late.json()["error"]["message"]
            with httpx.stream("POST", path, json=body | {"stream": True, "draftree": {"timeout": 0.2}}) as waiting:
                said = [line for line in waiting.iter_lines() if line]
            assert said.count(": waiting") > 2
            assert "timed out in the queue" in said[-2]
            assert said[-1] == "data: [DONE]"
        monkeypatch.undo()
        assert server.idle()
        assert server.complete("Hi", max_tokens=2)["choices"]
        waited = server.app.state.server.metrics.text().decode()
        assert "draftree_queue_seconds_count 2.0" in waited, "only what was begun has left the queue"


def test_a_disconnected_client_frees_its_slot(server: Running) -> None:
    def ended(finish: str) -> float:
        found = re.search(rf'draftree_requests_total{{finish="{finish}"}} (\S+)', server.http.get("/metrics").text)
        return 0 if found is None else float(found[1])

    before = ended("cancelled"), ended("length")
    body = {"prompt": "The sea", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.2)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as stream:
        next(stream.iter_lines())
    began = time.monotonic()
    assert server.idle(5)
    assert time.monotonic() - began < 1
    assert (ended("cancelled"), ended("length")) == (before[0] + 2, before[1])


def test_running_outputs_finish_at_shutdown(demo: Any) -> None:
    found: list[httpx.Response] = []
    with serving(*demo) as server:
        body = {"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        thread = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body)))
        thread.start()
        while not server.worker.live:
            time.sleep(0.005)
    thread.join()
    assert found[0].json()["usage"]["completion_tokens"] == 300


def test_outputs_cut_off_by_shutdown_are_errors(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[Any, httpx.Response] = {}
    body = {"prompt": "The sea", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    with serving(*demo, grace=1.5) as server:
        step = server.worker.engine.step
        monkeypatch.setattr(server.worker.engine, "step", lambda: (time.sleep(0.02), step()))

        def ask(name: Any, **fields: Any) -> None:
            found[name] = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60)

        threads = [threading.Thread(target=ask, args=[s], kwargs={"stream": s}) for s in (False, True)]
        for thread in threads:
            thread.start()
        while server.worker.live < 2:
            time.sleep(0.005)
        server.server.should_exit = True
        while server.worker.alive:
            time.sleep(0.005)
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "stopping"})
        ask("late")
        ask("late echo", echo=True, logprobs=1)
        for thread in threads:
            thread.join()
    for response in (found[False], found["late"], found["late echo"]):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "shutting down" in response.json()["error"]["message"]
    *_, last, done = found[True].text.removesuffix("\n\n").split("\n\n")
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    assert '"finish_reason":"length"' not in found[True].text


def test_a_second_interrupt_stops_at_once(
    demo: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[httpx.Response] = []
    body = {"prompt": "The sea", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    with serving(*demo, grace=60.0) as server:
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        step = server.worker.engine.step
        monkeypatch.setattr(server.worker.engine, "step", lambda: (time.sleep(0.05), step()))
        asking = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body)))
        asking.start()
        while not server.worker.live:
            time.sleep(0.005)
        began = time.monotonic()
        server.server.handle_exit(signal.SIGINT, None)
        while server.worker.alive:
            time.sleep(0.005)
        server.server.handle_exit(signal.SIGINT, None)
        server.thread.join()
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
        asking.join()
    assert time.monotonic() - began < 30
    assert found[0].status_code == 503
    assert not caplog.records


@pytest.mark.slow
def test_the_command_logs_and_stops_at_a_signal() -> None:
    command = [sys.executable, "-m", "draftree", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = re.search(r"http://[a-z]+:(\d+)", process.stdout.readline())
        assert said is not None
        address = ("127.0.0.1", int(said[1]))
        with socket.create_connection(address) as client:
            client.sendall(b"this is no HTTP\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        body = {"prompt": "The sea", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"http://localhost:{said[1]}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in rest[-4]
        _, logged = process.communicate(timeout=60)
    assert " uvicorn.error " in logged
    assert " POST /v1/completions 200 " in logged
    assert "Traceback" not in logged


def test_request_ids_are_returned(server: Running) -> None:
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(server.http.get("/health", headers={"x-request-id": "not an id"}).headers["x-request-id"]) == 32


def test_no_prompt_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftree.serve")
    server.complete("a very private text")
    server.post("/v1/completions", prompt="a very private text", nonsense=1)
    assert "POST /v1/completions 200" in caplog.text
    assert "private" not in caplog.text


Refused = Callable[[Sequence[str], str], None]


def test_an_empty_variable_for_keys_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", " , "):
        monkeypatch.setenv(KEYS, value)
        refused(["serve", "--port", "0"], f"{KEYS} is set and holds no key")
        refused(["serve", "--port", "0", "--api-key", "one"], f"{KEYS} is set and holds no key")
    monkeypatch.delenv(KEYS)
    assert keys_of(["one"]) == ("one",)


def test_other_hosts_are_refused(demo: Any) -> None:
    with serving(*demo, allowed_hosts=hosts_for("127.0.0.1", ["Models.example"], ())) as server:
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "models.example", "MODELS.example:443"):
            assert server.http.get("/health", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "evil.example:8000", ""):
            for path in ("/", "/health", "/v1/models"):
                answer = server.http.get(path, headers={"Host": host})
                assert answer.status_code == 421
                assert "--allowed-host" in answer.json()["error"]["message"]


def test_allowed_hosts() -> None:
    assert hosts_for("127.0.0.1", (), ()) == ("localhost", "127.0.0.1", "::1", "127.0.0.1")
    assert hosts_for("127.0.0.1", (), ("key",)) == hosts_for("0.0.0.0", (), ()) == ()
    assert "a.example" in hosts_for("0.0.0.0", ["a.example"], ("key",))
    assert ServerSettings().allowed_hosts == ()
    assert host_of("[::1]") == host_of("[::1]:80") == host_of("::1") == "::1"


def parts(model: Any, tokenizer: Any) -> dict[str, Any]:
    return {"drafter": Lookahead(), "pruner": None}


def test_a_checked_launch_frees_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    load, seen = launch.load_model, []

    def watched(*arguments: Any) -> Any:
        model, tokenizer = load(*arguments)
        seen.append(weakref.ref(model))
        return model, tokenizer

    monkeypatch.setattr(launch, "load_model", watched)
    Launch(None, parts).check()
    assert [model() for model in seen] == [None]


def test_a_launch_of_an_encoder_decoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_model", lambda *_: (build("t5"), None))
    with pytest.raises(ValueError, match=r"decoder-only models: use draftree\.generate"):
        Launch(None, parts).check()
