"""A server of the embedded model, or any other, on a free port of this machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

import draftree
from draftree.engine import Engine
from draftree.serve.app import GracefulServer, create_app
from draftree.serve.settings import ServerSettings

MESSAGES: Any = [{"role": "user", "content": "Tell me about the sea."}]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, special tokens included."""
    found: list[int] = tokenizer(text).input_ids
    return found


class Running:
    """A server at work; `url` is its address."""

    def __init__(self, app: Any, grace: float = 5.0) -> None:
        self.app = app
        self.server = GracefulServer(self.worker, app=app, port=0, log_level="error", grace=grace)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def worker(self) -> Any:
        return self.app.state.server.worker

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must be one; greedy unless told otherwise."""
        response = self.post("/v1/completions", **({"prompt": prompt, "temperature": 0} | fields))
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end with [DONE]."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def idle(self, seconds: float = 10.0) -> bool:
        """Whether nothing waits or runs, at last."""
        end = time.monotonic() + seconds
        while self.worker.live or self.worker.engine.busy:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join()


@contextmanager
def serving(
    model: Any, tokenizer: Any, drafter: Any = "lookahead", shape: Any = None, grace: float = 5.0, **settings: Any
) -> Iterator[Running]:
    drafter = draftree.Lookahead() if drafter == "lookahead" else drafter
    chosen = ServerSettings(**settings)
    engine = Engine(model, drafter=drafter, shape=shape, slots=chosen.slots, keep_prefixes=True)
    running = Running(create_app(engine, tokenizer, chosen), grace)
    try:
        yield running
    finally:
        running.close()
