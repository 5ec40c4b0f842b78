"""Load a server with requests that finish or are cancelled: no slot is lost and memory stays flat.

The slow suite runs two minutes; `DRAFTREE_SOAK=30` makes it thirty. After a warm-up that fills caches, a line through
the readings of memory may rise by 1 % an hour, and by the noise of single readings.
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
WARM_UP = min(max(60.0, 20 * MINUTES), 30 * MINUTES)  # Seconds.
HOURLY = 0.01  # Allowed growth of memory an hour.
NOISE = (1 + 8 / MINUTES) * 2**20  # Bytes by which readings differ, and which slowly filling caches take.
EVERY = 2.0  # Seconds between readings.
WORDS = ["sea", "ship", "blue", "and", "the", "of", "cards", "in", "a", "two"]


def memory(pid: int) -> int:
    """Return the resident bytes of a process without those of files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def body(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt": " ".join(rng.choices(WORDS, k=rng.randrange(1, 200))), "ignore_eos": True}
    found |= {"max_tokens": rng.randrange(1, 120), "temperature": rng.choice([0, 0.7, 1.3])}
    more = {"n": 2, "stop": ["\n", "a b"], "logprobs": 3, "frequency_penalty": 0.5, "user": f"user {rng.randrange(20)}"}
    return found | {name: value for name, value in more.items() if rng.random() < 0.2}


async def client(url: str, rng: random.Random, end: float, counts: dict[str, int]) -> None:
    path = "/v1/completions"
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while time.monotonic() < end:
            kind = rng.random()
            with contextlib.suppress(httpx.TimeoutException):
                if kind < 0.15:
                    counts["timeout"] += 1
                    await http.post(path, json=body(rng), timeout=rng.random() / 20)
                elif kind < 0.3:
                    async with http.stream("POST", path, json=body(rng) | {"stream": True}) as stream:
                        assert stream.status_code in (200, 429)
                        async for _ in stream.aiter_lines():
                            if rng.random() < 0.3:
                                counts["cancelled stream"] += 1
                                break
                else:
                    response = await http.post(path, json=body(rng))
                    assert response.status_code in (200, 429), response.text
                    counts[str(response.status_code)] += 1
                    await asyncio.sleep(0.1 if response.status_code == 429 else 0)


def test_memory_is_flat_and_no_slot_is_lost(demo: Any, tmp_path: Path) -> None:
    trie = str(tmp_path / "small.trie")
    Lookahead(max_nodes=4096).save(trie, demo.tokenizer)  # A small trie is soon full.
    command = [sys.executable, "-m", "draftree", "serve", "--port", "0", "--slots", "4", "--queue", "4", "--trie", trie]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=(tmp_path / "log").open("w"), text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split(" at ")[1].split("/v1")[0]
    counts = dict.fromkeys(("timeout", "cancelled stream", "200", "429"), 0)
    read: list[tuple[float, int]] = []

    async def load(seconds: float, seed: int) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(url, random.Random(100 * seed + i), end, counts) for i in range(12)))

    async def measured(seconds: float) -> None:
        began, task = time.monotonic(), asyncio.ensure_future(load(seconds, 1))
        while time.monotonic() - began < seconds - EVERY:
            read.append(((time.monotonic() - began) / 3600, memory(process.pid)))
            await asyncio.sleep(EVERY)
        await task

    try:
        asyncio.run(load(WARM_UP, 0))
        asyncio.run(measured(60 * MINUTES - WARM_UP))
        hours, held = np.array(read).T
        hourly, first = np.polyfit(hours, held, 1)
        deadline = time.monotonic() + 10
        while httpx.get(f"{url}/server_info").json()["live"]:
            assert time.monotonic() < deadline, "a request never ended"
            time.sleep(0.05)
        text = httpx.get(f"{url}/metrics").text
        assert "draftree_running_requests 0.0" in text
        assert not re.search(r'draftree_http_responses_total{status="5|draftree_requests_total{finish="error"', text)
        assert all(counts.values())
        message = f"{first / 2**20:.1f} MiB after the warm-up, {hourly / 2**20:.2f} more an hour ({hourly / first:.2%})"
        assert hourly * hours[-1] < NOISE + HOURLY * hours[-1] * first, message
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 or process.returncode == -signal.SIGTERM
