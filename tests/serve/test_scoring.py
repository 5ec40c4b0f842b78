"""Scores of prompts that clients ask for by `echo` with `logprobs`: within the limits that answers have."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from serve_driver import Running, serving

from draftree.engine.passes import score_prompt

SCORED: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1}


def test_overload_is_told(demo: Any) -> None:
    with serving(*demo, slots=2, queue=3) as server:
        found: list[httpx.Response] = []

        def ask() -> None:
            body = {"prompt": [5] * 2000, **SCORED}
            found.append(server.http.post("/v1/completions", json=body))

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = [response.status_code for response in found]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 5
        refused = next(response for response in found if response.status_code == 429)
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.post("/v1/completions", prompt=[[5, 6]] * 6, **SCORED).status_code == 400, "never any room"
        assert server.post("/v1/completions", prompt=[[5, 6]] * 5, **SCORED).status_code == 200
        assert server.idle()


def test_a_prompt_is_scored_once_and_all_in_one_cache(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, caches = [], []

    def spied(runner: Any, prompt: Any, count: int, cache: Any) -> Any:
        prompts.append(prompt)
        caches.append(cache)
        return score_prompt(runner, prompt, count, cache)

    monkeypatch.setattr("draftree.serve.scoring.score_prompt", spied)
    rows, fields = [[5, 6, 7], [8, 9]], {"echo": True, "logprobs": 1, "max_tokens": 2}
    several = server.complete(rows, n=3, **fields)["choices"]
    best = server.complete(rows, best_of=4, **fields)["choices"]
    assert prompts == rows * 2
    assert len({id(cache) for cache in caches}) == 1
    alone = [server.complete(row, **fields)["choices"][0]["logprobs"] for row in rows]
    assert [choice["logprobs"] for choice in several] == [alone[0]] * 3 + [alone[1]] * 3
    assert [choice["logprobs"] for choice in best] == alone


def test_time_is_bounded(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": [[5] * 2000] * 8, **SCORED}
    began = time.monotonic()
    late = server.post("/v1/completions", **asked, draftree={"timeout": 0.05})
    assert time.monotonic() - began < 5, "all of them take longer"
    assert late.status_code == 400
    assert late.json()["error"]["code"] == "timeout"
    assert "draftree.timeout" in late.json()["error"]["message"]
    assert server.idle(1)
    assert server.post("/v1/completions", prompt=[5, 6], **SCORED).status_code == 200


@pytest.mark.parametrize("fields", [SCORED, SCORED | {"max_tokens": 1, "stream": True}], ids=["whole", "stream"])
def test_whoever_goes_away_ends_it(server: Running, fields: dict[str, Any]) -> None:
    asked = {"prompt": [[5] * 2000] * 64, **fields}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=asked, timeout=0.5)
    assert server.idle(2)


def test_scores_stop_with_the_server(demo: Any) -> None:
    found: list[httpx.Response] = []
    with serving(*demo) as server:
        body = {"prompt": [[5] * 2000] * 64, **SCORED}
        thread = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body)))
        thread.start()
        while not server.worker.live:
            time.sleep(0.005)
        server.worker.close(0.1)
    thread.join()
    assert found[0].status_code == 503
