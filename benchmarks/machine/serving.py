"""The server against the engine that it stands on, and against `transformers serve`, under the same load.

The load comes from a process of its own, as it would from clients; the engine alone gets the same prompts at once
and no HTTP, and one after another for what is compared with one stream at a time. Replicas on Ray have a core each
where there are enough, and the load has none. All take turns, round by round.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import torch

import draftree
from benchmarks.harness import Experiment, Setup, bars, table_of
from draftree.drafting import Drafter
from draftree.engine import Engine, SamplingParams
from draftree.engine.limits import eos_token_ids

NAME = "measured"
ALONE, WHOLE, STREAM = "engine alone", "serve", "serve, streams"
ALONE_ONE, STREAM_ONE = "engine alone, one at a time", "serve, one stream at a time"
STOCK = "transformers serve"
PATIENCE = 120.0  # seconds for a server to start
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {"none": lambda: None, "lookahead": draftree.Lookahead}


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a second of the engine alone, of the server on it, and of transformers' server."""
    texts = [task.prompt.text for task in setup.tasks]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    differing = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / NAME  # for other processes
        setup.save(setup.model, folder)
        if setup["stock"]:
            options = ("--continuous-batching", "--device", "cpu", "--dtype", "float32")
            stock = stack.enter_context(program("transformers", str(folder), *options))
        for _ in range(setup["rounds"]):
            for drafter in setup["drafters"]:
                for way in (ALONE, ALONE_ONE):
                    direct = alone(setup, DRAFTERS[drafter](), one=way == ALONE_ONE)
                    found.setdefault((drafter, way), []).append(direct)
                for way in (WHOLE, STREAM, STREAM_ONE):
                    with server(setup, DRAFTERS[drafter]()) as url:
                        loaded = load(setup, url, NAME, texts, stream=way != WHOLE, one=way == STREAM_ONE)
                    found.setdefault((drafter, way), []).append(loaded)
                    differing += sum(map(str.__ne__, loaded["answers"], direct["answers"]))
                for count in setup["replicas"]:
                    with replicas_of(setup, folder, drafter, count) as url:
                        loaded = load(setup, url, NAME, texts, stream=False)
                    found.setdefault((drafter, f"{count} on Ray"), []).append(loaded)
                    differing += sum(map(str.__ne__, loaded["answers"], direct["answers"]))
            if setup["stock"]:  # where the model's name is its folder
                found.setdefault(("none", STOCK), []).append(load(setup, stock, str(folder), texts, stream=False))
            yield table(found, differing)


def table(found: dict[tuple[str, str], list[dict[str, Any]]], differing: int) -> pd.DataFrame:
    """Return a row for each drafter and way, medians over the rounds."""
    rows = []
    for (drafter, way), rounds in found.items():
        speeds = pd.Series([one["tokens"] / one["seconds"] for one in rounds])
        compared = ALONE_ONE if way == STREAM_ONE else ALONE
        base = pd.Series([one["tokens"] / one["seconds"] for one in found[drafter, compared]])
        first = pd.Series([seconds for one in rounds for seconds in one["first"]], dtype=float)
        rows.append(
            {
                "drafter": drafter,
                "way": way,
                "tokens/s": speeds.median(),
                "of the engine alone": (speeds / base).median(),
                "us a token more": ((1 / speeds - 1 / base) * 1e6).median(),
                "ms to first, median": first.median() * 1000,
                "ms to first, p95": first.quantile(0.95) * 1000,
            }
        )
    remark = f"Answers of the server that differ from those of the engine alone: {differing}."
    return table_of(rows, remarks=[remark], differing=differing)


def alone(setup: Setup, drafter: Drafter | None, *, one: bool) -> dict[str, Any]:
    """Return the engine with one prompt after another, or all at once."""
    params = SamplingParams(setup["max_new_tokens"], eos_token_ids=eos_token_ids(setup.model))
    engine = Engine(setup.model, drafter=drafter, slots=setup["slots"], keep_prefixes=True)
    with engine:
        began = time.perf_counter()
        requests = []
        for task in setup.tasks:
            requests.append(engine.add(task.ids, params))
            if one:
                engine.run()
        engine.run()
        seconds = time.perf_counter() - began
    answers = [setup.tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]
    return {"seconds": seconds, "tokens": sum(len(r.tokens) for r in requests), "first": [], "answers": answers}


def load(setup: Setup, url: str, model: str, texts: list[str], *, stream: bool, one: bool = False) -> dict[str, Any]:
    """What a load from a process of its own finds."""
    asked = {"url": url, "model": model, "texts": texts, "stream": stream}
    asked |= {"concurrency": 1 if one else setup["concurrency"], "max_tokens": setup["max_new_tokens"]}
    command = [sys.executable, "-m", "benchmarks.machine.load"]
    done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@contextmanager
def server(setup: Setup, drafter: Drafter | None) -> Iterator[str]:
    """The server in a thread of this process, on a free port, whose threads take turns as in a process of its own."""
    import uvicorn

    from draftree.serve.app import SWITCH, create_app
    from draftree.serve.settings import ServerSettings

    sys.setswitchinterval(SWITCH)
    engine = Engine(setup.model, drafter=drafter, slots=setup["slots"], keep_prefixes=True)
    settings = ServerSettings(model_name=NAME, slots=setup["slots"])
    app = create_app(engine, setup.tokenizer, settings)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


@contextmanager
def program(name: str, *options: str) -> Iterator[str]:
    """A server in a process of its own, on a free port: its address; a RuntimeError where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / name), "serve", *options, "--port", str(port)]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not answers(url):
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError(f"There is no server at {url}.")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Return whether a server says that it is well."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def replicas_of(setup: Setup, folder: Path, drafter: str, count: int) -> AbstractContextManager[str]:
    """So many replicas on Ray, each with as many threads as the engine alone has."""
    options = {"--model": str(folder), "--name": NAME, "--drafter": drafter, "--slots": setup["slots"]}
    options |= {"--replicas": count, "--threads": torch.get_num_threads()}
    return program("draftree", *(str(part) for pair in options.items() for part in pair))


EXPERIMENT = Experiment(
    run,
    ("drafter", "way", "tokens/s", "of the engine alone", "us a token more", "ms to first, median", "ms to first, p95"),
    bars("tokens/s", label="way", mark=None),
    {"per_set": 4, "max_new_tokens": 64, "sets": (), "drafters": ("none", "lookahead"), "slots": 8, "concurrency": 16}
    | {"rounds": 3, "stock": True, "replicas": ()},
    name="serving",
)
