"""Candidates run for real, interleaved with each other and with plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftree.bench.measure import measure, ready
from draftree.bench.methods import Draftree
from draftree.bench.summary import Row, summarise
from draftree.progress import Watcher
from draftree.tuning.file import shape_of
from draftree.tuning.record import Text
from draftree.tuning.replay import Replayed
from draftree.tuning.space import PLAIN, Candidate, Space


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate that ran for real."""

    candidate: Candidate
    row: Row  # its figures in the last round it took part in
    prompts: int  # how many it answered there
    # What replay predicts for the same prompts, in the same order; None where it cannot be replayed.
    predicted: Replayed | None
    stage: int = 0  # how many times the slower half had left before

    @property
    def over_plain(self) -> float:
        """Speed over plain decoding."""
        return self.row.over[PLAIN.name].value

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        candidate, stats = self.candidate, self.row.stats
        entry: dict[str, Any] = {
            "label": candidate.label,
            "drafter": None if candidate.spec is None else candidate.spec.as_dict(),
            "node_budget": candidate.node_budget,
            "prompts": self.prompts,
            "tokens_per_second": asdict(self.row.speed),
            "over_plain": asdict(self.row.over[PLAIN.name]),
            "acceptance_length": None if stats is None else stats.acceptance_length,
        }
        if self.predicted is not None:
            entry["predicted_acceptance_length"] = self.predicted.stats.acceptance_length
            entry["predicted_tokens_per_second"] = self.predicted.speed
        return entry


def run_live(
    space: Space,
    candidates: Sequence[Candidate],
    texts: Sequence[Text],
    watcher: Watcher,
    rounds: int = 1,
    stage: int = 0,
) -> list[Judged]:
    """Answer `texts` with every candidate and plainly, interleaved; each starts from its first state."""
    tasks = [text.task for text in texts]
    methods = [_method(space, one) for one in (PLAIN, *candidates)]
    ready(methods, tasks[:1])
    watcher.stage("running", len(methods) * len(tasks) * rounds)
    rows = summarise(measure(methods, tasks, rounds, watcher), tasks, (PLAIN.name,))
    return [
        Judged(one, rows[one.name], len(tasks), None if one.spec is None else space.predict(one, texts), stage)
        for one in (PLAIN, *candidates)
    ]


def _method(space: Space, one: Candidate) -> Draftree:
    """A candidate as measurements take it; its drafter and its shape are made anew for every round."""
    return Draftree(
        one.name,
        space.model,
        space.new,
        lambda: space.drafter(one),
        lambda: None if one.spec is None else shape_of(one.node_budget),
    )
