"""Failures of outputs and steps: errors in the form of the API, and entries in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from serve_driver import MESSAGES, Running, serving
from tool_chat import TOOLS, talking

import draftree
from draftree.errors import ModelChangedError
from draftree.grammar import GrammarBusyError
from draftree.serve import worker as serve_worker
from draftree.serve.metrics import Metrics
from draftree.serve.output import OutputStream, RequestOutput
from draftree.serve.settings import StoppingError
from draftree.serve.worker import Scoring

PLAIN = "/v1/completions"
SECRET = "what the client has said"


def fails(*args: Any, **options: Any) -> Any:
    raise KeyError(SECRET)


def counted(server: Running, status: int) -> float:
    """Return the number of responses with this status in the metrics."""
    name = f'draftree_http_responses_total{{status="{status}"}} '
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].removeprefix(name)) if lines else 0.0


def test_a_failure_is_answered_counted_and_logged(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = counted(server, 500)
    monkeypatch.setattr(server.app.state.server.calls, "completion", fails)
    body = {"prompt": SECRET, "max_tokens": 3}
    response = server.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "mine"
    error = response.json()["error"]
    assert (error["type"], error["message"]) == ("server_error", "The server could not answer: its log says why.")
    assert counted(server, 500) == before + 1
    assert "mine failed with KeyError at test_failures.py:" in caplog.text
    assert "POST /v1/completions 500" in caplog.text
    assert SECRET not in caplog.text
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


@pytest.mark.parametrize(
    ("error", "wait"), [(ModelChangedError(), None), (GrammarBusyError(), "60"), (ValueError("No such prompt."), None)]
)
def test_errors_of_the_server_get_status_503(
    server: Running, monkeypatch: pytest.MonkeyPatch, error: Exception, wait: str | None
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(draftree.Engine, "add", refuses)
    response = server.http.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 3})
    own = type(error) is ValueError
    assert response.status_code == (400 if own else 503)
    found = response.json()["error"]
    assert (found["type"], found["message"]) == ("invalid_request_error" if own else "server_error", str(error))
    assert response.headers.get("Retry-After") == wait


def test_a_request_at_the_end_of_the_worker_is_refused(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tasks(SimpleQueue[Any]):
        def put(self, task: Any, *args: Any, **options: Any) -> None:
            if isinstance(task, partial):  # a request, which comes behind the last look for one
                worker.close()
            super().put(task, *args, **options)

    monkeypatch.setattr(serve_worker, "SimpleQueue", Tasks)
    engine = draftree.Engine(demo.model, slots=1)
    worker = serve_worker.Worker(engine, demo.tokenizer, Metrics(engine))
    parts = [RequestOutput([1, 2, 3], draftree.SamplingParams(8, ()))]

    async def ask() -> None:
        await asyncio.wait_for(worker.start(OutputStream(parts, 60.0, worker.cancel, whole=False)), 5.0)

    with pytest.raises(StoppingError):
        asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_fails(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    monkeypatch.setattr("draftree.detokenizer.Detokenizer.feed", fails)
    body = {"prompt": SECRET, "max_tokens": 3, "stream": stream}
    response = server.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    text = response.text.removeprefix("data: ").partition("\n\n")[0]
    assert json.loads(text)["error"]["type"] == "server_error"
    assert response.status_code == (200 if stream else 500)
    assert response.text.endswith("data: [DONE]\n\n") == stream
    assert "mine failed with KeyError at test_failures.py:" in caplog.text
    assert SECRET not in caplog.text
    assert server.idle()


def test_the_end_of_the_engine_s_thread_fails_all_requests(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prompt": "The sea", "ignore_eos": True, "max_tokens": 1500}
    with serving(*demo) as server, ThreadPoolExecutor() as pool:
        worker = server.worker
        running = [pool.submit(server.post, PLAIN, **asked), pool.submit(server.post, PLAIN, **asked, stream=True)]
        while len(worker.engine.running) < 2:
            time.sleep(0.005)
        monkeypatch.setattr(worker.metrics, "emitted", fails)
        scoring = Scoring([[1, 2, 3]], iter(()), time.monotonic() + 60)
        worker._tasks.put(partial(worker._add_scoring, scoring))
        for answer in running:
            assert "shutting down" in answer.result().text
        with pytest.raises(StoppingError):
            scoring.found.result(10)
        assert server.http.get("/health").status_code == 503
        assert server.post(PLAIN, prompt="Hi", max_tokens=1).status_code == 503
        assert worker.live == 0


def test_an_incomplete_call_is_content(demo: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "tools": TOOLS, "tool_choice": "required"}
    with serving(demo.model, talking(demo.tokenizer)) as server:
        for end, finish in (({"max_tokens": 10}, "length"), ({"max_tokens": 200, "stop": ["arguments"]}, "stop")):
            response = server.post("/v1/chat/completions", **asked, **end)
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            assert choice["message"]["content"].startswith("<call>")
            assert "tool_calls" not in choice["message"]
            assert choice["finish_reason"] == finish
            choices = [event["choices"][0] for event in server.events("/v1/chat/completions", **asked, **end)]
            content = "".join(one["delta"].get("content", "") for one in choices)
            assert (content, choices[-1]["finish_reason"]) == (choice["message"]["content"], finish)
    assert "failed" not in caplog.text


def test_a_client_that_disconnects_while_sending(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.2)
    end = time.monotonic() + 10
    while "POST /v1/completions" not in caplog.text and time.monotonic() < end:
        time.sleep(0.02)
    assert "POST /v1/completions 499" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_path_cannot_write_lines_into_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftree.serve")
    server.http.get("/x%0a2026 draftree.serve POST /v1/completions 200%0d%1b[2J" + "y" * 1000)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "draftree.serve"]
    assert "GET /x?2026 draftree.serve POST" in line
    assert line.isprintable()
    assert len(line) < 300


def health(server: Running) -> tuple[int, str]:
    response = server.http.get("/health")
    return response.status_code, response.json()["status"]


@pytest.mark.parametrize(
    ("error", "steps"), [(RuntimeError("no"), 3), (getattr(torch, "AcceleratorError", RuntimeError)("no"), 1)]
)
def test_health_fails_until_a_step_succeeds(demo: Any, error: Exception, steps: int) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise error

    with serving(*demo) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.worker.engine.loop, "advance", broken)
            for _ in range(steps):
                assert health(server) == (200, "ok")
                assert server.post(PLAIN, prompt="Hi", max_tokens=1).status_code == 500
            assert health(server) == (503, "failing")
            assert server.idle()
            assert health(server) == (503, "failing")  # the token that was tried has failed too
            assert server.idle()
        end = time.monotonic() + 10
        while health(server) != (200, "ok") and time.monotonic() < end:
            time.sleep(0.02)
        assert health(server) == (200, "ok")


def test_keep_alive_is_refused_with_replicas(refused: Any) -> None:
    refused(["serve", "--replicas", "2", "--keep-alive", "9"], "leave --keep-alive out with --replicas")
