"""Two replicas on Ray Serve: equal text, dialogues that return to their cache, a replica killed while it streams."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
ROOT = Path(__file__).parents[2]
TEXTS = [f"Tell me a long story of the {thing}." for thing in ("sea", "wood", "hill", "town", "bird", "king", "moon")]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def serving(command: list[Any], port: int) -> Iterator[str]:
    """Run a server in a process of its own."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    try:
        assert any("draftree serves at" in line for line in process.stdout), "it does not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    command = [
        Path(sys.executable).parent / "draftree",
        "serve",
        "--replicas",
        "2",
        "--threads",
        "1",
        "--port",
        str(port),
    ]
    with serving(command, port) as found:
        yield found


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def expected(demo: Any) -> Any:
    """Return a function for greedy answers of the engine, as token ids."""
    import draftree

    def answer(text: str, new: int) -> list[int]:
        ids = demo.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        out = draftree.generate(demo.model, ids, max_new_tokens=new, eos_token_id=[])
        found: list[int] = out.sequences[0, ids.shape[1] :].tolist()
        return found

    return answer


def asked(text: str, new: int, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": new, "ignore_eos": True}
    return body | {"return_token_ids": True} | fields


def stream(http: httpx.Client, body: dict[str, Any]) -> tuple[list[int], str | None]:
    """Return token ids of a stream, and the message of the error that ended it."""
    ids, error = [], None
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                error = chunk.get("error", {}).get("message", error)
                ids += [i for choice in chunk.get("choices", ()) for i in choice.get("token_ids", ())]
    return ids, error


def replicas() -> list[int]:
    """Return the process ids of the replicas."""
    found = subprocess.run(["pgrep", "-f", "^ray::ServeReplica:draftree:Replica"], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def gauge(http: httpx.Client, name: str) -> dict[str, float]:
    """Return a metric by replica."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return {line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_answers_equal_the_engine_s_on_both_replicas(http: httpx.Client, expected: Any) -> None:
    with ThreadPoolExecutor(14) as pool:
        whole = list(pool.map(lambda t: http.post("/v1/chat/completions", json=asked(t, 60)).json(), TEXTS))
        streams = list(pool.map(lambda t: stream(http, asked(t, 60)), TEXTS))
    for text, one, (ids, error) in zip(TEXTS, whole, streams, strict=True):
        assert one["choices"][0]["token_ids"] == ids == expected(text, 60)
        assert error is None
    answered = gauge(http, "draftree_generated_tokens_total")
    assert len(answered) == 2
    assert min(answered.values()) > 0


def test_a_dialogue_returns_to_its_cache(http: httpx.Client) -> None:
    def dialogue(number: int) -> list[tuple[int, int]]:
        messages = [{"role": "user", "content": f"{number}: {TEXTS[number]} It may be as long as you like, or longer."}]
        told = []
        for _ in range(3):
            body = {"messages": messages, "temperature": 0, "max_tokens": 20}
            found = http.post("/v1/chat/completions", json=body).json()
            usage = found["usage"]
            told.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
            messages += [found["choices"][0]["message"], {"role": "user", "content": "And what came then?"}]
        return told

    with ThreadPoolExecutor(6) as pool:
        for first, second, third in pool.map(dialogue, range(6)):
            assert second[1] >= first[0] - 1
            assert third[1] >= second[0] - 1


def test_refusals_equal_the_server_s(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json={"prompt": "x", "suffix": "y"})
    assert refused.status_code == 400
    assert "suffix" in refused.json()["error"]["message"]
    assert http.get("/nothing").status_code == 404
    assert http.post("/v1/completions", content=b" " * (5 << 20)).status_code == 413
    assert http.post("/v1/corpus", json={"texts": ["The sea is wide."]}).json()["texts"] == 1
    assert "text/html" in http.get("/").headers["content-type"]


def test_a_disconnected_client_frees_its_slot(http: httpx.Client) -> None:
    slow = asked(TEXTS[0], 1800, stream=True, temperature=1.5, seed=1, draftree={"drafter": "off"})
    with http.stream("POST", "/v1/chat/completions", json=slow) as response:
        lines = response.iter_lines()  # httpx closes the stream with these lines.
        next(lines)
        assert sum(gauge(http, "draftree_running_requests").values()) == 1
    end = time.monotonic() + 10
    while sum(gauge(http, "draftree_running_requests").values()):
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.1)


def test_a_killed_replica_ends_its_own_streams_only(http: httpx.Client, expected: Any) -> None:
    known = {text: expected(text, 700) for text in TEXTS}
    found: dict[str, tuple[list[int], str | None]] = {}

    def plain(text: str) -> None:
        found[text] = stream(http, asked(text, 700))

    threads = [threading.Thread(target=plain, args=(text,)) for text in TEXTS]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while sum(gauge(http, "draftree_running_requests").values()) < 4:
        assert time.monotonic() < end, "they do not begin"
    before = replicas()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    after = http.post("/v1/chat/completions", json=asked(TEXTS[0], 20)).json()
    for thread in threads:
        thread.join()
    assert after["choices"][0]["token_ids"] == known[TEXTS[0]][:20], "others go on"
    broken = [text for text, (_, error) in found.items() if error is not None]
    assert 0 < len(broken) < len(TEXTS)
    for text, (ids, error) in found.items():
        assert ids == known[text] if error is None else ("has failed" in error and ids == known[text][: len(ids)])
    end = time.monotonic() + 60
    while len(gauge(http, "draftree_running_requests")) < 2:
        assert time.monotonic() < end, "no other replica takes its place"
        time.sleep(0.5)
