"""Samples on disk while a comparison runs, so that a run that was killed goes on where it stopped.

One line of a journal holds what all methods answered to one group of prompts. From these answers tries learn again
what they had learned by then (`Method.recall`); the calibration of tree sizes comes back within some dozens of steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from draftree.bench.measure import Sample
from draftree.bench.methods import Answer
from draftree.engine import RequestStats
from draftree.training.journal import Journal

PER_ROUND, PER_CASE = 10**6, 10**9  # numbers of a journal that a round and a case have to themselves


@dataclass(frozen=True, slots=True)
class CaseLog:
    """The part of a journal that belongs to one case of a comparison: a `Log`.

    Attributes:
        journal: an open one.
        entries: what it held when it was opened.
        case: the number of the case.
    """

    journal: Journal
    entries: dict[int, list[dict[str, Any]]]
    case: int

    def held(self, number: int, group: int) -> list[Sample] | None:
        """Samples of round `number` and group `group` from before a stop; None where there are none."""
        rows = self.entries.get(self.case * PER_CASE + number * PER_ROUND + group)
        return None if rows is None else [from_dict(row) for row in rows]

    def keep(self, number: int, group: int, samples: list[Sample]) -> None:
        """Write what all methods answered to that group in that round."""
        self.journal.add(self.case * PER_CASE + number * PER_ROUND + group, [as_dict(sample) for sample in samples])


def as_dict(sample: Sample) -> dict[str, Any]:
    """A sample as plain values."""
    stats = sample.answer.stats
    bare = replace(sample, answer=replace(sample.answer, stats=None))
    return asdict(bare) | {"stats": None if stats is None else stats.as_dict()}


def from_dict(row: dict[str, Any]) -> Sample:
    """The sample that `as_dict` wrote."""
    answer, held = row["answer"], row["stats"]
    stats = None
    if held is not None:  # counts, and figures that follow from them
        counts = {one.name: held[one.name] for one in fields(RequestStats)}
        stats = RequestStats(**counts | {"accepted_by_source": Counter(held["accepted_by_source"])})
    answer = Answer(**answer | {"lengths": tuple(answer["lengths"]), "stats": stats})
    return Sample(**{name: value for name, value in row.items() if name != "stats"} | {"answer": answer})
