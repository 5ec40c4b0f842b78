"""Scores of prompts that clients ask for by `echo` with `logprobs`: within the limits that answers have."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from serve_driver import Running, serving

from draftree.engine.passes import score_prompt

SCORED: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1}


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


def test_a_client_that_disconnects_ends_its_scoring(server: Running) -> None:
    asked = {"prompt": [[5] * 2000] * 64, **SCORED}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=asked, timeout=0.5)
    assert server.idle(2)


def test_prompts_to_score_count_for_the_queue(demo: Any) -> None:
    with serving(*demo, slots=2, queue=3) as server:
        assert server.post("/v1/completions", prompt=[[5, 6]] * 6, **SCORED).status_code == 400
        assert server.post("/v1/completions", prompt=[[5, 6]] * 5, **SCORED).status_code == 200
