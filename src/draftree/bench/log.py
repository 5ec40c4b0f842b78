"""Samples on disk while a comparison runs, so that a run that was killed goes on where it stopped.

One line of a journal holds what all methods answered to one group of prompts; groups come in the same order in every
run of the same plan. From these answers tries learn again what they had learned by then (`Method.recall`); the
calibration of tree sizes comes back within some dozens of steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields, replace
from typing import Any

from draftree.bench.samples import Answer, Sample
from draftree.engine import RequestStats
from draftree.training.journal import Journal


class Log:
    """Keeps the answers to one group of prompts after the other in an open journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._entries = journal.entries()
        self._next = 0
        self.resumed = len(self._entries)  # groups that it held when it was opened

    def held(self) -> list[Sample] | None:
        """What all methods answered to the next group before a stop; None behind the last group that was kept."""
        rows = self._entries.get(self._next)
        if rows is None:
            return None
        self._next += 1
        return [from_dict(row) for row in rows]

    def keep(self, samples: list[Sample]) -> None:
        """Keep what all methods answered to the group that has just been measured."""
        self._journal.add(self._next, [as_dict(sample) for sample in samples])
        self._next += 1


def as_dict(sample: Sample) -> dict[str, Any]:
    """A sample as plain values."""
    return asdict(replace(sample, answer=replace(sample.answer, stats=None))) | {
        "stats": None if sample.answer.stats is None else sample.answer.stats.as_dict()
    }


def from_dict(row: dict[str, Any]) -> Sample:
    """The sample that `as_dict` wrote."""
    answer, held = row["answer"], row["stats"]
    stats = None
    if held is not None:  # counts, and figures that follow from them
        counts = {one.name: held[one.name] for one in fields(RequestStats)}
        stats = RequestStats(**counts | {"accepted_by_source": Counter(held["accepted_by_source"])})
    answer = Answer(**answer | {"lengths": tuple(answer["lengths"]), "stats": stats})
    return Sample(**{name: value for name, value in row.items() if name != "stats"} | {"answer": answer})
