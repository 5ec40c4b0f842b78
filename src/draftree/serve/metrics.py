"""What the server counts, for Prometheus: under its own names, and speculation also under vLLM's for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftree.drafting.lookahead import Lookahead
from draftree.drafting.merge import parts_of
from draftree.engine import Engine, RequestStats
from draftree.serve.parts import Part

LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Counts of one server.

    Args:
        engine: its gauges are read when they are asked for.
    """

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.total = RequestStats()
        own: Any = {"registry": self.registry}
        self._responses = Counter("draftree_http_responses", "Responses by status.", ["status"], **own)
        self._requests = Counter("draftree_requests", "Answers that are over, by how they ended.", ["finish"], **own)
        self._prompt = Counter("draftree_prompt_tokens", "Prompt tokens.", **own)
        self._reused = Counter("draftree_reused_prompt_tokens", "Prompt tokens that the cache had already.", **own)
        self._emitted = Counter("draftree_generated_tokens", "New tokens.", **own)
        self._steps = Counter("draftree_steps", "Passes, counted for each request in them.", **own)
        self._stages = Counter("draftree_step_seconds", "Time of steps by stage.", ["stage"], **own)
        self._sources = Counter("draftree_accepted_tokens_by_drafter", "Accepted draft tokens.", ["drafter"], **own)
        self._latencies = _Latencies(self.registry)
        self._speculation = [
            _Speculation(prefix, self.registry) for prefix in ("draftree_spec_decode_", "vllm:spec_decode_")
        ]
        self.registry.register(_Gauges(engine))

    def responded(self, status: int) -> None:
        """An HTTP response begins."""
        self._responses.labels(str(status)).inc()

    def ended(self, part: Part) -> None:
        """An answer is over."""
        request = part.request
        assert request is not None
        stats = request.stats
        self.total.add(stats)
        self._requests.labels(part.finish or "error").inc()
        self._prompt.inc(len(part.prompt))
        self._reused.inc(request.reused)
        self._emitted.inc(part.given)
        self._steps.inc(stats.steps)
        for stage, seconds in stats.seconds.items():
            self._stages.labels(stage).inc(seconds)
        for name, count in stats.accepted_by_source.items():
            self._sources.labels(name).inc(count)
        for speculation in self._speculation:
            speculation.add(stats)
        self._latencies.add(part)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)


class _Speculation:
    """What was drafted and accepted, under names that begin with `prefix`."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}{name}", text, labels, registry=registry)

        self._drafts = counter("num_drafts", "Steps of a request that verified draft tokens or its own alone.")
        self._drafted = counter("num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = counter("num_accepted_tokens", "Draft tokens that were accepted.")
        self._by_position = counter(
            "num_accepted_tokens_per_pos", "Accepted draft tokens by depth, from 0.", "position"
        )

    def add(self, stats: RequestStats) -> None:
        """Count a request that is over."""
        self._drafts.inc(stats.steps)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position, count in enumerate(stats.accepted_by_depth):
            self._by_position.labels(str(position)).inc(count)


class _Latencies:
    """How long answers and their parts took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"draftree_{name}_seconds", text, buckets=LATENCIES, registry=registry)

        self._queue = seconds("queue", "From arrival to a slot.")
        self._first = seconds("time_to_first_token", "From arrival to the first token.")
        self._between = seconds("inter_token", "Mean time between an answer's tokens.")
        self._whole = seconds("request", "From arrival to the end.")

    def add(self, part: Part) -> None:
        """Count an answer that is over."""
        if part.joined is not None:
            self._queue.observe(part.joined - part.added)
        if part.first is not None:
            self._first.observe(part.first - part.added)
            self._whole.observe(part.last - part.added)
            if part.given > 1:
                self._between.observe((part.last - part.first) / (part.given - 1))


class _Gauges(Collector):
    """What an engine holds at the moment."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, cache = self._engine, self._engine.cache
        held = sum(cache.lengths[: len(engine.running)])
        yield GaugeMetricFamily("draftree_running_requests", "Requests in slots.", len(engine.running))
        yield GaugeMetricFamily("draftree_waiting_requests", "Requests that wait for a slot.", len(engine.waiting))
        yield GaugeMetricFamily("draftree_slots", "Requests decoded together at most.", engine.config.slots)
        yield GaugeMetricFamily("draftree_kv_tokens", "Tokens of running requests in the KV cache.", held)
        yield GaugeMetricFamily("draftree_kv_bytes", "Bytes of the KV cache.", cache.nbytes)
        tries = sum(trie.nbytes for trie in parts_of(engine.config.drafter, Lookahead))
        yield GaugeMetricFamily("draftree_trie_bytes", "Bytes of what tries have learned.", tries)
