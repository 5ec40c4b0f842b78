"""Count requests, tokens and times for Prometheus; speculation also under vLLM's names for benchmarks.

Requests count at their end. Tokens, steps, times to first tokens and times between tokens count during an answer. The
tokens and steps of running answers are summed when the metrics are read, so that a step spends no time on it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.engine import Engine, RequestStats
from draftree.serve.output import RequestOutput

LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics(Collector):
    """Collect the counts of one server and the state of its engine; written in the worker's thread, read in any."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"registry": self.registry}

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"draftree_{name}_seconds", text, buckets=LATENCIES, **own)

        self._responses = Counter("draftree_http_responses", "Responses by status.", ["status"], **own)
        self._requests = Counter("draftree_requests", "Finished answers, by how they ended.", ["finish"], **own)
        self._queue = seconds("queue", "From arrival to a slot.")
        self._first = seconds("time_to_first_token", "From arrival to the first token.")
        self._between = seconds("inter_token", "Between an answer's tokens; those of one step share its time.")
        self._whole = seconds("request", "From arrival to the end.")
        self._engine = engine
        self._over = _Sums()
        self._live: dict[int, RequestOutput] = {}
        self._lock = threading.Lock()  # An ending answer must be counted exactly once.
        self.registry.register(self)

    @property
    def total(self) -> RequestStats:
        """Return the counts of all answers, up to their latest step."""
        return self._sums().stats

    def responded(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(str(status)).inc()

    def added(self, outputs: Sequence[RequestOutput]) -> None:
        """Add answers that wait for slots."""
        with self._lock:
            self._live |= {id(output): output for output in outputs}

    def emitted(self, output: RequestOutput, count: int, before: float | None) -> None:
        """Count new tokens of an answer; `before` is the time of the previous token, None for none."""
        if before is None:
            self._first.observe(output.last - output.added)
            count, before = count - 1, output.last
        for _ in range(count):
            self._between.observe((output.last - before) / count)

    def ended(self, output: RequestOutput) -> None:
        """Count a finished answer."""
        with self._lock:
            del self._live[id(output)]
            self._over.add(output)
        self._requests.labels(output.finish or "error").inc()
        if output.joined is not None:
            self._queue.observe(output.joined - output.added)
        if output.first is not None:
            self._whole.observe(output.last - output.added)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield sums over all answers, and the present state of the engine."""
        yield from _counters(self._sums())
        yield from _gauges(self._engine)

    def _sums(self) -> _Sums:
        """Return the sums of all answers until now."""
        with self._lock:
            found = replace(self._over, stats=self._over.stats.copy())
            for output in self._live.values():
                found.add(output)
        return found


@dataclass(slots=True)
class _Sums:
    """Sum tokens and steps of answers."""

    prompt: int = 0
    reused: int = 0
    given: int = 0
    stats: RequestStats = field(default_factory=RequestStats)

    def add(self, output: RequestOutput) -> None:
        """Add the present counts of an answer."""
        request = output.request
        assert request is not None
        if output.joined is not None:
            self.prompt += len(output.prompt)
            self.reused += request.reused
        self.given += output.given
        self.stats.add(request.stats.copy())


def _counters(sums: _Sums) -> Iterator[Metric]:
    stats = sums.stats
    yield CounterMetricFamily("draftree_prompt_tokens", "Prompt tokens.", sums.prompt)
    yield CounterMetricFamily("draftree_reused_prompt_tokens", "Prompt tokens that were in the cache.", sums.reused)
    yield CounterMetricFamily("draftree_generated_tokens", "New tokens.", sums.given)
    yield CounterMetricFamily("draftree_steps", "Passes, counted for each request in them.", stats.steps)
    yield _labelled("draftree_step_seconds", "Time of steps by stage.", "stage", stats.seconds)
    by_source = stats.accepted_by_source
    yield _labelled("draftree_accepted_tokens_by_drafter", "Accepted draft tokens.", "drafter", by_source)
    for prefix in ("draftree_spec_decode_", "vllm:spec_decode_"):
        yield from _speculation(prefix, stats)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    found = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        found.add_metric([value], count)
    return found


def _speculation(prefix: str, stats: RequestStats) -> Iterator[Metric]:
    """Yield drafted and accepted tokens, under names that begin with `prefix`."""
    drafts = "Steps of a request that verified draft tokens or its own alone."
    yield CounterMetricFamily(f"{prefix}num_drafts", drafts, stats.steps)
    yield CounterMetricFamily(f"{prefix}num_draft_tokens", "Draft tokens that were verified.", stats.drafted)
    yield CounterMetricFamily(f"{prefix}num_accepted_tokens", "Draft tokens that were accepted.", stats.accepted)
    by_position = {str(position): count for position, count in enumerate(stats.accepted_by_depth)}
    text = "Accepted draft tokens by depth, from 0."
    yield _labelled(f"{prefix}num_accepted_tokens_per_pos", text, "position", by_position)


def _gauges(engine: Engine) -> Iterator[Metric]:
    """Yield the present state of an engine."""
    cache = engine.cache
    held = sum(cache.lengths[: len(engine.running)])
    yield GaugeMetricFamily("draftree_running_requests", "Requests in slots.", len(engine.running))
    yield GaugeMetricFamily("draftree_waiting_requests", "Requests that wait for a slot.", len(engine.waiting))
    yield GaugeMetricFamily("draftree_slots", "Requests decoded together at most.", engine.config.slots)
    yield GaugeMetricFamily("draftree_kv_tokens", "Tokens of running requests in the KV cache.", held)
    text = "Tokens of finished requests that the KV cache keeps for prompts with the same beginning."
    yield GaugeMetricFamily("draftree_kv_kept_tokens", text, engine.scheduler.kept_tokens)
    room = cache.slots * (cache.capacity - cache.prefix_length)
    yield GaugeMetricFamily("draftree_kv_capacity_tokens", "Tokens that the KV cache holds before it grows.", room)
    yield GaugeMetricFamily("draftree_kv_bytes", "Bytes of the KV cache.", cache.nbytes)
    tries = sum(trie.nbytes for trie in parts_of(engine.config.drafter, Lookahead))
    yield GaugeMetricFamily("draftree_trie_bytes", "Bytes of the tries.", tries)
