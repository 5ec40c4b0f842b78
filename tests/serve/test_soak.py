"""The server under load for long: requests that come, go and break off; nothing is lost and nothing grows.

Two minutes in the slow suite; `DRAFTREE_SOAK=30` makes it thirty. Memory is read after a warm-up, when caches have
filled, and a line through what was read may rise by a hundredth an hour, and by what single readings differ: the longer
it runs, the less that hides. Tries learn up to their bound, which is small here: else they would grow for hours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from draftree.drafting import Lookahead

MINUTES = float(os.environ.get("DRAFTREE_SOAK", "2"))
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(60 * MINUTES + 180)]
WARM_UP = min(max(60.0, 20 * MINUTES), 30 * MINUTES)  # seconds
HOURLY = 0.01  # of the memory after the warm-up
# Bytes: the rise of a line through readings that differ by a few MiB from each other, and what caches that fill slowly
# still take after a short warm-up.
NOISE = (1 + 8 / MINUTES) * 2**20
EVERY = 2.0  # seconds between readings
TRIE_NODES = 4096  # of a trie, which has two; there is one for each of twenty users and one for all others


def start(log: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "draftree", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split(" at ")[1].split("/v1")[0]


def memory(pid: int) -> int:
    """Resident bytes of a process but for those of files, which are read when code is first met."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def body(rng: random.Random) -> dict[str, Any]:
    words = ["sea", "ship", "blue", "and", "the", "of", "cards", "in", "a", "two"]
    found: dict[str, Any] = {"prompt": " ".join(rng.choices(words, k=rng.randrange(1, 200)))}
    found |= {"max_tokens": rng.randrange(1, 120), "temperature": rng.choice([0, 0.7, 1.3]), "ignore_eos": True}
    if rng.random() < 0.2:
        found["n"] = rng.randrange(1, 4)
    if rng.random() < 0.2:
        found |= {"stop": rng.choice(["the", "e", ["\n", "a b"]])}
    if rng.random() < 0.2:
        found |= {"logprobs": 3, "frequency_penalty": 0.5}
    if rng.random() < 0.3:
        found["user"] = f"user {rng.randrange(20)}"
    return found


async def client(url: str, rng: random.Random, end: float, counts: dict[str, int]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while time.monotonic() < end:
            kind = rng.random()
            with contextlib.suppress(httpx.TimeoutException):
                if kind < 0.15:  # goes away
                    counts["left"] += 1
                    await http.post("/v1/completions", json=body(rng), timeout=rng.random() / 20)
                elif kind < 0.3:  # leaves a stream in the middle
                    async with http.stream("POST", "/v1/completions", json=body(rng) | {"stream": True}) as stream:
                        assert stream.status_code in (200, 429)
                        async for _ in stream.aiter_lines():
                            if rng.random() < 0.3:
                                counts["broken off"] += 1
                                break
                elif kind < 0.4:  # sends nonsense
                    response = await http.post("/v1/completions", content=rng.randbytes(rng.randrange(200)))
                    assert response.status_code == 400
                    counts["nonsense"] += 1
                else:
                    asked = body(rng)
                    if rng.random() < 0.3:
                        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
                        asked |= {"logprobs": True} if asked.pop("logprobs", 0) else {}
                    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
                    response = await http.post(path, json=asked)
                    assert response.status_code in (200, 429), response.text
                    counts[str(response.status_code)] += 1
                    if response.status_code == 429:
                        await asyncio.sleep(0.1)


def test_memory_is_flat_and_no_slot_is_lost(demo: Any, tmp_path: Path) -> None:
    trie = str(tmp_path / "small.trie")
    Lookahead(max_nodes=TRIE_NODES).save(trie, demo.tokenizer)
    process, url = start(tmp_path / "log", "--slots", "4", "--queue", "4", "--trie", trie)
    counts = dict.fromkeys(("left", "broken off", "nonsense", "200", "429"), 0)

    async def load(seconds: float, seed: int) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(url, random.Random(100 * seed + i), end, counts) for i in range(12)))

    try:
        asyncio.run(load(WARM_UP, 0))
        began, read = time.monotonic(), list[tuple[float, int]]()

        async def readings() -> None:
            while time.monotonic() - began < 60 * MINUTES - WARM_UP - EVERY:
                read.append(((time.monotonic() - began) / 3600, memory(process.pid)))
                await asyncio.sleep(EVERY)

        async def both() -> None:
            await asyncio.gather(load(60 * MINUTES - WARM_UP, 1), readings())

        asyncio.run(both())
        hours, held = np.array(read).T
        hourly, first = np.polyfit(hours, held, 1)
        deadline = time.monotonic() + 10
        while httpx.get(f"{url}/server_info").json()["live"]:
            assert time.monotonic() < deadline, "a request never ended"
            time.sleep(0.05)
        text = httpx.get(f"{url}/metrics").text
        assert "draftree_running_requests 0.0" in text
        assert not re.search(r'draftree_http_responses_total{status="5', text)
        assert not re.search(r'draftree_requests_total{finish="error"', text)
        message = f"{first / 2**20:.1f} MiB after the warm-up, {hourly / 2**20:.2f} more an hour ({hourly / first:.2%})"
        print(f"{counts}, {message}")
        assert all(counts.values())
        assert hourly * hours[-1] < NOISE + HOURLY * hours[-1] * first, message
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 or process.returncode == -signal.SIGTERM
