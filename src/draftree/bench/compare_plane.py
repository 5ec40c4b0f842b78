"""What a drafter's trees bring and what they cost, apart: accepted length against the time to verify.

A point's speed over plain decoding would be its height over its abscissa if nothing but the pass took time; what
guessing and looking after guesses cost is the difference to the speed that was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from draftree.bench.compare_case import Result
from draftree.bench.compare_methods import label_of, parts_of
from draftree.bench.harness import Sample

LETTERS = {
    "lookahead_warm": "L",
    "lookahead_cold": "L",
    "draft_model": "D",
    "medusa": "M",
    "hidden_transfer": "H",
    "bita": "B",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One way of guessing.

    Attributes:
        method: its name.
        short: letters for pictures.
        sources: how many drafters it joins.
        length: acceptance length, 1 + accepted / steps.
        verify: seconds of a decoding step's pass, over a plain one's.
        speed: tokens a second over plain decoding.
    """

    method: str
    short: str
    sources: int
    length: float
    verify: float
    speed: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"label": label_of(self.method)}


def points_of(result: Result) -> list[Point]:
    """The drafters of a case in the plane; prompts are read at plain speed and left out."""
    plain = _pass_seconds(result.samples, result.plain)
    found = []
    for name, row in result.rows.items():
        if row.stats is None or not row.stats.drafted or row.stats.steps < 2:
            continue
        parts = parts_of(name)
        short = "+".join(LETTERS.get(part, label_of(part)) for part in parts)
        verify = _pass_seconds(result.samples, name) / plain
        speed = row.over[result.plain].value
        found.append(Point(name, short, len(parts), row.stats.acceptance_length, verify, speed))
    return found


def _pass_seconds(samples: list[Sample], method: str) -> float:
    own = [s.answer for s in samples if s.method == method and s.answer.stats is not None]
    seconds = sum(a.stats.seconds["verify"] - a.prompt_verify for a in own if a.stats is not None)
    steps = sum(a.stats.steps - 1 for a in own if a.stats is not None)
    return seconds / max(steps, 1)
