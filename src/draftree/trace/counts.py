"""Counts of a trace: the statistics of its requests, made again from its steps alone.

They equal the run's own statistics to the last bit: a trace that did not add up would show something else than what
happened.
"""

from __future__ import annotations

from draftree.engine.stats import RequestStats, RunStats
from draftree.trace.file import Trace


def statistics(trace: Trace) -> dict[int, RequestStats]:
    """Each request's statistics, by its id; sums are taken in the engine's own order."""
    found = {request: RequestStats() for request in trace.requests}
    for step in trace.steps:
        sources = trace.runs[step["run"]]["sources"]
        share = 1 / len(step["members"])
        for member in step["members"]:
            stats = found[member["request"]]
            stats.count(member["accepted"], len(member["tokens"]) - 1, passed=step["passed"])
            accepted = (node for node in member["accepted"] if node is not None)
            stats.accepted_by_source.update(sources[member["sources"][node]] for node in accepted)
            stats.pruned += len(member["pruned"])
            for stage, seconds in step["seconds"].items():
                stats.seconds[stage] += seconds * share
    return found


def run_statistics(trace: Trace) -> RunStats:
    """The same for all requests together, as `generate` returns it."""
    return RunStats(list(statistics(trace).values()))
