"""`draftree bench speed`: how far the engine is from the machine's limits, and from Hugging Face's ways of decoding.

Two models, the embedded one (or a named one) and one inflated from it, are measured alike: steps by their rows against
the memory's speed, and answers of all methods in one interleaved run. The figures made of both stand next to their
targets. The trie is warmed once, by the small model, since both give the same answers. `draftree bench gpu` measures
with the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftree.bench.case import Result, facts_of, run_case
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
from draftree.bench.kit import ASSISTED, COMPILED, PLAIN, PROMPT_LOOKUP, REFERENCE, Kit, make_kit
from draftree.bench.machine import now
from draftree.bench.report import Report, Table
from draftree.bench.steps import Steps, check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import open_runner

ROWS = (1, 2, 4, 8, 16, 32)
SMALL_ROUNDS = 5  # times as many rounds of the small model's steps, which are short
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED, PLAIN, *DRAFTING)


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """How much `bench speed` measures.

    Attributes:
        answers: prompts, their lengths and what warms the trie.
        rounds: how often a step of each kind is timed.
        context: tokens before its rows.
        inflated_answers: how many prompts the inflated model answers at most.
    """

    answers: Settings
    rounds: int = 3
    context: int = 128
    inflated_answers: int = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model: `label` names it in tables, `figures` are rows of a table."""

    label: str
    steps: Steps
    case: Result
    figures: list[dict[str, Any]]

    @property
    def tables(self) -> list[Table]:
        """All but the figures."""
        return [step_table(self.label, self.steps), case_table(self.case), stage_table(self.label, self.case)]

    @property
    def remarks(self) -> list[str]:
        """Lines below the tables."""
        return [f"{self.label}: {line}" for line in (f"runner {self.case.about['runner']}.", *remarks(self.case))]

    def facts(self) -> dict[str, Any]:
        """Further plain values, for JSON."""
        return {"about": self.case.about, "floor": self.steps.floor} | self.case.facts()


def run_speed(
    subject: Subject,
    prompts: Sequence[Prompt],
    settings: SpeedSettings,
    *,
    params: str | None = "400M",
    watcher: Watcher | None = None,
) -> Report:
    """Measure.

    Args:
        subject: a llama, mistral or qwen2 model on the CPU.
        prompts: to measure on and to warm the trie with.
        settings: how much.
        params: inflate it to about so many parameters; None leaves the inflated model out.
        watcher: shows progress.

    Raises:
        ValueError: a size that cannot be made, a prompt or context that does not fit, before any work.
    """
    watcher = watcher or Watcher()
    check_context(settings.context, ROWS[-1], subject.model)
    texts = encode_all(subject, prompts, settings.answers)
    about = subject.about() | {"started": now()}
    watcher.stage("inflating", None)
    large = subject.inflated(params)
    kit = make_kit(subject, texts.lessons, settings.answers, watcher)

    def measured(label: str, targets: Targets, kit: Kit, texts: Texts, rounds: int) -> Measured:
        steps = time_rows(kit.model, open_runner(kit.model), ROWS, settings.context, rounds, watcher)
        return measure_answers(label, targets, kit, steps, texts, METHODS, watcher)

    label = "embedded" if subject.name is None else "small"
    found = [measured(label, OF_EMBEDDED, kit, texts, SMALL_ROUNDS * settings.rounds)]
    if params is not None:
        about["model"] += f", and inflated to {params}"
        few = texts.spread(settings.inflated_answers)
        found.append(measured(params, OF_INFLATED, replace(kit, subject=large), few, settings.rounds))
    figures = [row for one in found for row in one.figures]
    return Report(
        "speed",
        "Speed against the machine's limits and Hugging Face's ways",
        about | facts_of(settings, texts),
        [Table("Figures and their targets", figures, COLUMNS), *(table for one in found for table in one.tables)],
        [line for one in found for line in one.remarks],
        {"models": {one.label: one.facts() for one in found}},
        lambda figure: draw(figure, figures, [(one.label, one.steps) for one in found]),
    )


def measure_answers(
    label: str, targets: Targets, kit: Kit, steps: Steps, texts: Texts, names: Sequence[str], watcher: Watcher
) -> Measured:
    """Answer `texts` with the methods `names` of a model whose `steps` were timed, and make its figures."""
    names = [method for method in names if kit.settings.compiled or method != COMPILED]
    case = run_case(kit, texts, names, watcher, part=f"{label}: ")
    parameters = sum(weight.numel() for weight in kit.model.parameters())
    case.about.update({"runner": open_runner(kit.model).form, "parameters": parameters})
    return Measured(label, steps, case, figures_of(targets, label, steps, case))
