"""`draftree bench speed`: how far the engine is from the machine's limits, and from Hugging Face's ways of decoding.

Steps by their rows are timed against the memory's speed, and answers of all methods in one interleaved run. The figures
made of both stand next to their targets, where there are any. `draftree bench gpu` measures with the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.bench.case import Result, run_case
from draftree.bench.case_report import case_table, remarks, stage_table
from draftree.bench.figures import (
    COLUMNS,
    DRAFTING,
    OF_EMBEDDED,
    OF_INFLATED,
    Targets,
    draw,
    figures_of,
    step_table,
)  # fmt: skip
from draftree.bench.inputs import Settings, Subject, Texts, encode_all
from draftree.bench.kit import Kit, make_kit
from draftree.bench.names import ASSISTED, COMPILED, PLAIN, PROMPT_LOOKUP, REFERENCE
from draftree.bench.report import Report, Table
from draftree.bench.steps import LOOP, Steps, check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import open_runner

ROWS = (1, 2, 4, 8, 16, 32)
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED, PLAIN, *DRAFTING)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model; `figures` are rows of a table."""

    steps: Steps
    case: Result
    figures: list[dict[str, Any]]

    @property
    def tables(self) -> list[Table]:
        """All but the figures."""
        return [step_table(self.steps), case_table(self.case), stage_table(self.case)]

    @property
    def remarks(self) -> list[str]:
        """Lines below the tables."""
        return [*remarks(self.case), f"Runner: {self.case.about['runner']}."]

    def facts(self) -> dict[str, Any]:
        """Further plain values, for JSON."""
        return {"floor": self.steps.floor} | self.case.facts()

    def draw(self, figure: Any) -> None:
        """Put the picture into a matplotlib figure."""
        draw(figure, self.figures, self.steps)


def run_speed(
    subject: Subject,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    params: str | None = None,
    rounds: int = 7,
    context: int = 128,
    watcher: Watcher | None = None,
) -> Report:
    """Measure, on the model inflated to about `params` parameters where those are given.

    A step of each kind is timed `rounds` times, behind `context` tokens; `settings` are those of the answers.

    Raises:
        ValueError: a size that cannot be made, a prompt or context that does not fit, before any work.
    """
    watcher = watcher or Watcher()
    check_context(context, ROWS[-1], subject.model)
    texts = encode_all(subject, prompts, settings)
    kit = make_kit(subject.inflated(params), texts.lessons, settings, watcher)
    steps = time_rows(kit.model, {LOOP: (open_runner(kit.model), ROWS)}, context, rounds, watcher)
    targets = OF_INFLATED if params is not None else OF_EMBEDDED if subject.name is None else {}
    found = measure_answers(kit, steps, texts, METHODS, targets, watcher)
    tables, says = found.tables, "Speed against the machine's limits and Hugging Face's ways"
    figures = Table("Figures and their targets", found.figures, COLUMNS)
    return Report("speed", says, found.case.about, [figures, *tables], found.remarks, found.facts(), found.draw)


def measure_answers(
    kit: Kit, steps: Steps, texts: Texts, names: Sequence[str], targets: Targets, watcher: Watcher
) -> Measured:
    """Answer `texts` with the methods `names` of a model whose `steps` were timed, and make its figures."""
    names = [method for method in names if kit.settings.compiled or method != COMPILED]
    case = run_case(kit, texts, names, watcher)
    parameters = sum(weight.numel() for weight in kit.model.parameters())
    case.about.update({"runner": open_runner(kit.model).form, "parameters": parameters})
    return Measured(steps, case, figures_of(targets, steps, case))
