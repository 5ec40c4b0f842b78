"""Metrics: under vLLM's names too, and of running outputs."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
from serve_driver import Running, serving

from draftree import Fixed

LONG = {"prompt": "The sea the sea the sea", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


def counts(server: Running) -> dict[str, float]:
    """Return each sample of the metrics by its name and labels."""
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_metrics_have_the_names_of_vllm_s_benchmark(server: Running) -> None:
    before = counts(server)
    answer = server.complete("The sea the sea the sea", max_tokens=40, ignore_eos=True, draftree={"stats": True})
    stats = answer["draftree"]["answers"][0]
    after = counts(server)
    for name, count in (("drafts", "steps"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
        for prefix in ("vllm:spec_decode", "draftree_spec_decode"):
            key = f"{prefix}_num_{name}_total"
            assert after[key] - before[key] == stats[count]
    key = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'
    assert after[key] - before.get(key, 0) == stats["accepted_by_depth"][0]
    assert after["draftree_generated_tokens_total"] - before["draftree_generated_tokens_total"] == 40
    assert after["draftree_time_to_first_token_seconds_count"] > before["draftree_time_to_first_token_seconds_count"]
    assert after["draftree_running_requests"] == 0


def test_gauges_of_the_cache(demo: Any) -> None:
    """Tokens in a free slot count as kept until another prompt takes them over."""
    with serving(*demo, slots=2) as server:
        names = ("draftree_kv_tokens", "draftree_kv_kept_tokens", "draftree_reused_prompt_tokens_total")
        assert [counts(server)[name] for name in names] == [0, 0, 0]
        for reused in (0, 7):
            assert server.complete([5, 6, 7, 8, 9, 10, 11, 12], max_tokens=4, ignore_eos=True)["choices"]
            assert server.idle()
            found = counts(server)
            assert [found[name] for name in names] == [0, 8 + 3, reused]  # the newest token is in no cache yet
            assert found["draftree_kv_capacity_tokens"] >= 11


def test_running_outputs_are_counted(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stay counted after the client disconnects."""
    with serving(*demo, shape=Fixed(8), slots=2) as server, ExitStack() as stack:
        engine, begun, allowed = server.worker.engine, threading.Semaphore(0), threading.Semaphore(0)
        stack.callback(allowed.release, 2000)  # a test that fails must not wait for the server
        step = engine.step

        def held() -> None:
            begun.release()
            allowed.acquire()
            step()

        def checked() -> dict[str, float]:
            found, stats = counts(server), [request.stats for request in requests]
            for prefix in ("vllm:spec_decode", "draftree_spec_decode"):
                assert found[f"{prefix}_num_drafts_total"] == sum(s.steps for s in stats)
                assert found[f"{prefix}_num_draft_tokens_total"] == sum(s.drafted for s in stats)
                assert found[f"{prefix}_num_accepted_tokens_total"] == sum(s.accepted for s in stats)
            assert found["draftree_generated_tokens_total"] == sum(s.emitted for s in stats)
            assert found["draftree_prompt_tokens_total"] == sum(r.context.prompt_length for r in requests if r.output)
            by_drafter = [n for name, n in found.items() if name.startswith("draftree_accepted_tokens_by_drafter")]
            assert sum(by_drafter) == sum(s.accepted for s in stats)
            return found

        monkeypatch.setattr(engine, "step", held)
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 2}):
            assert begun.acquire(timeout=60)
            requests = list(engine.waiting)
            assert checked()["draftree_generated_tokens_total"] == 0
            for steps in (5, 10):
                allowed.release(5)
                for _ in range(5):
                    assert begun.acquire(timeout=60)  # what the step before brought has been handed out
                assert checked()["draftree_spec_decode_num_drafts_total"] == steps * len(requests)
        allowed.release(2000)
        assert server.idle()
        assert checked()['draftree_requests_total{finish="cancelled"}'] == 2
        info = server.http.get("/server_info").json()["internal_states"][0]
        accepted, steps = (sum(getattr(r.stats, name) for r in requests) for name in ("accepted", "steps"))
        assert info["avg_spec_accept_length"] == pytest.approx(1 + accepted / steps)
