"""Samples on disk while a comparison runs, so that a run that was killed goes on where it stopped.

One line of a journal holds what all methods answered to one group of prompts. What drafters had learned by then is
taught again from these answers (`Method.recall`); what tree sizes were calibrated on is not, and comes back within
some dozens of steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from draftree.bench.measure import Log, Sample
from draftree.bench.methods import Answer
from draftree.engine import RequestStats
from draftree.training.journal import Journal

PER_ROUND, PER_CASE = 10**6, 10**9  # numbers of a journal that a round and a case have to themselves


class CaseLog(Log):
    """The part of a journal that belongs to one case of a comparison.

    Args:
        journal: open.
        entries: what it held when it was opened.
        case: the number of the case.
    """

    def __init__(self, journal: Journal, entries: dict[int, list[dict[str, Any]]], case: int) -> None:
        self._journal, self._entries, self._first = journal, entries, case * PER_CASE

    def held(self, number: int, group: int) -> list[Sample] | None:
        """See `Log.held`."""
        rows = self._entries.get(self._first + number * PER_ROUND + group)
        return None if rows is None else [from_dict(row) for row in rows]

    def keep(self, number: int, group: int, samples: list[Sample]) -> None:
        """See `Log.keep`."""
        self._journal.add(self._first + number * PER_ROUND + group, [as_dict(sample) for sample in samples])


def as_dict(sample: Sample) -> dict[str, Any]:
    """A sample as plain values."""
    answer = sample.answer
    return {
        "method": sample.method,
        "task": sample.task,
        "round": sample.round,
        "turn": sample.turn,
        "prompt_ids": sample.ids,
        "answer_ids": answer.ids,
        "seconds": answer.seconds,
        "lengths": list(answer.lengths),
        "prompt_verify": answer.prompt_verify,
        "stats": None if answer.stats is None else answer.stats.as_dict(),
    }


def from_dict(row: dict[str, Any]) -> Sample:
    """The sample that `as_dict` wrote."""
    stats = None
    if row["stats"] is not None:
        held = row["stats"]  # counts, and figures that follow from them
        counts = {one.name: held[one.name] for one in fields(RequestStats) if one.name in held}
        counts["accepted_by_source"] = Counter(counts["accepted_by_source"])
        stats = RequestStats(**counts)
    answer = Answer(row["answer_ids"], row["seconds"], stats, tuple(row["lengths"]), row["prompt_verify"])
    return Sample(row["method"], row["task"], row["round"], answer, row["turn"], row["prompt_ids"])
