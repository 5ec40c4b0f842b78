"""What a server's other clients feel while somebody sends too much: python -m benchmarks.machine.attack [MODEL].

Starts `draftree serve` on this machine, and sends it prompts and texts as long as the largest body. Meanwhile `/health`
and a small request are timed. Prints a table and exits with 1 where a bound is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

BODY = 4 << 20  # bytes that the server reads by default
PROMPTS = 12
PROBES = 100  # small requests at least, and as many looks at /health
BOUNDS = {"/health": 0.2, "small request": 1.0}  # seconds, 99th percentile
MORE_MEMORY = 1.10
SMALL = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}
WORDS = "the sea and a ship that sails into the wind while the keeper of the light waits for rain "


@contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    """Yield a server of that model; its address, and its process."""
    command = [sys.executable, "-m", "draftree", "serve", "--port", "0", "--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "http://" in line)
            yield "http://" + line.partition("http://")[2].partition("/v1")[0], process.pid
        finally:
            process.terminate()


def resident(process: int) -> float:
    """Return the resident memory of a process in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1000


def long_texts(url: str, path: str, length: int) -> list[int]:
    """Send texts of so many bytes, `PROMPTS` at once; return their statuses."""
    text = (WORDS * (length // len(WORDS) + 1))[:length]
    body: dict[str, Any] = {"texts": [text]} if path == "/v1/corpus" else {"prompt": text, "max_tokens": 1}

    def send(_: int) -> int:
        with httpx.Client(base_url=url, timeout=600) as client:
            return client.post(path, json=body).status_code

    with ThreadPoolExecutor(PROMPTS) as pool:
        return list(pool.map(send, range(PROMPTS)))


def timed(url: str, attack: Callable[[], list[int]]) -> tuple[list[int], dict[str, float], int]:
    """Time the small requests beside an attack; return its statuses, 99th percentiles, and requests timed."""
    seconds: dict[str, list[float]] = {name: [] for name in BOUNDS}
    over = threading.Event()

    def probe(name: str) -> None:
        with httpx.Client(base_url=url, timeout=600) as client:
            while not (over.is_set() and len(seconds[name]) >= PROBES):
                began = time.perf_counter()
                asked = client.get("/health") if name == "/health" else client.post("/v1/completions", json=SMALL)
                asked.raise_for_status()
                seconds[name].append(time.perf_counter() - began)
                time.sleep(0.02)

    probes = [threading.Thread(target=probe, args=(name,)) for name in BOUNDS]
    for thread in probes:
        thread.start()
    statuses = attack()
    over.set()
    for thread in probes:
        thread.join()
    worst = {name: sorted(found)[int(0.99 * (len(found) - 1))] for name, found in seconds.items()}
    return statuses, worst, min(map(len, seconds.values()))


def main(model: str) -> int:
    """Run all attacks; return the exit status."""
    missed = 0
    with server(model) as (url, process):
        for path in ("/v1/completions", "/v1/corpus"):  # first calls, and the thread's own memory
            long_texts(url, path, 1000)
        room = BODY - 200
        limit = httpx.post(f"{url}/tokenize", json={"prompt": "a" * room}, timeout=600).json()
        accepted = int(limit["error"]["message"].rpartition("at most ")[2].split(":")[0]) if "error" in limit else room
        attacks: dict[str, Callable[[], list[int]]] = {
            "nothing": lambda: [],
            f"{PROMPTS} prompts of 4 MiB": lambda: long_texts(url, "/v1/completions", room),
            f"{PROMPTS} prompts of {accepted >> 10} KiB": lambda: long_texts(url, "/v1/completions", accepted),
            f"{PROMPTS} texts of 4 MiB for the trie": lambda: long_texts(url, "/v1/corpus", room),
        }
        timed(url, list)
        before = resident(process)
        print(f"{'beside':36}{'statuses':>14}{'/health p99':>14}{'small p99':>12}{'requests':>10}{'MB':>8}")
        for name, attack in attacks.items():
            statuses, worst, count = timed(url, attack)
            time.sleep(1)
            memory = resident(process)
            told = ",".join(map(str, sorted(set(statuses)))) or "-"
            figures = (
                f"{worst['/health'] * 1000:11.0f} ms{worst['small request'] * 1000:9.0f} ms{count:10}{memory:8.0f}"
            )
            print(f"{name:36}{told:>14}{figures}", flush=True)
            missed += sum(worst[what] > bound for what, bound in BOUNDS.items())
            missed += memory > MORE_MEMORY * before and "trie" not in name
    print("All bounds hold." if not missed else f"{missed} bounds were missed.")
    return min(missed, 1)


if __name__ == "__main__":
    os.environ.pop("DRAFTREE_API_KEYS", None)
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "embedded"))
