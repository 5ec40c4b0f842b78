"""`draftree bench speed`: how far the engine is from the machine's limits, and from Hugging Face's ways of decoding.

Two models, the embedded one (or a named one) and one inflated from it, are measured alike: steps by their rows against
the memory's speed, and answers of all methods in one interleaved run. The figures made of both stand next to their
targets. The trie is warmed once, by the small model, since both give the same answers. `gpu` measures with the same
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftree.bench.case import Result, facts_of, run_case
from draftree.bench.figures import (
    DRAFTING,
    Figure,
    draw_steps,
    draw_targets,
    figure_table,
    figures_of,
    step_table,
)
from draftree.bench.inflate import Size
from draftree.bench.inputs import Settings, Subject, Texts, encode_all
from draftree.bench.kit import ASSISTED, COMPILED, PLAIN, PROMPT_LOOKUP, REFERENCE, Kit, make_kit
from draftree.bench.machine import MADE, now
from draftree.bench.report import Report, case_table, heading, remarks, stage_table
from draftree.bench.steps import Steps, check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import open_runner

ROWS = (1, 2, 4, 8, 16, 32)
SMALL_ROUNDS = 5  # times as many rounds of the small model's steps, which are short
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED, PLAIN, *DRAFTING)


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """How much `bench speed` and `bench gpu` measure.

    Attributes:
        per_set: prompts of every set that are answered.
        max_new_tokens: most tokens of an answer.
        rounds: how often a step of each kind is timed.
        context: tokens before its rows.
        warm_per_set: prompts of every set that warm the trie.
        compiled: whether to measure Hugging Face's static cache with torch.compile.
        answers: how many prompts the inflated model of `bench speed` answers at most.
        seconds: that `bench gpu` may take; fewer prompts are answered where it would take longer.
    """

    per_set: int = 1
    max_new_tokens: int = 48
    rounds: int = 3
    context: int = 128
    warm_per_set: int = 23
    compiled: bool = False
    answers: int = 4
    seconds: float = 480.0

    @property
    def case(self) -> Settings:
        """The settings of the answers: one round, one prompt at a time."""
        return Settings(self.per_set, self.max_new_tokens, 1, self.warm_per_set, self.compiled)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model, and how: `label` names it in tables, `about` says where it was made."""

    label: str
    about: dict[str, Any]
    steps: Steps
    case: Result
    figures: list[Figure]


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
    texts = encode_all(subject, prompts, settings.case)
    about = subject.about() | {"started": now()}
    watcher.stage("inflating", None)
    large = subject.inflated(params)
    kit = make_kit(subject, texts.lessons, settings.case, watcher)

    def measured(label: str, kind: str, kit: Kit, texts: Texts, rounds: int) -> Measured:
        steps = time_rows(kit.model, open_runner(kit.model), ROWS, settings.context, rounds, watcher)
        return measure_answers(label, kind, kit, steps, texts, METHODS, watcher)

    label = "embedded" if subject.name is None else "small"
    found = [measured(label, "embedded", kit, texts, SMALL_ROUNDS * settings.rounds)]
    if params is not None:
        about["model"] += f" and inflated to {params}"
        few = texts.spread(settings.answers)
        found.append(measured(params, "inflated", replace(kit, subject=large), few, settings.rounds))
    models = {o.label: {"about": o.about, "floor": o.steps.floor, "answers": o.case.as_dict()} for o in found}
    return report_of("speed", about | facts_of(settings, texts), found, {"models": models})


def measure_answers(
    label: str, kind: str, kit: Kit, steps: Steps, texts: Texts, names: Sequence[str], watcher: Watcher
) -> Measured:
    """Answer `texts` with the methods `names` of a model whose `steps` were timed; `kind` chooses its targets."""
    names = [method for method in names if kit.settings.compiled or method != COMPILED]
    case = run_case(kit, texts, names, watcher, part=f"{label}: ")
    size = asdict(Size.of(kit.model.config)) | {"parameters": Size.of(kit.model.config).parameters}
    about = case.about | {"runner": open_runner(kit.model).form, "size": size}
    return Measured(label, about, steps, case, figures_of(kind, label, steps, case))


def report_of(
    name: str,
    about: dict[str, Any],
    found: Sequence[Measured],
    more: dict[str, Any],
    rows: Sequence[dict[str, Any]] = (),
    tables: Sequence[Any] = (),
) -> Report:
    """The report of measured models; every row of its JSON file says where it was made.

    Args:
        name: of its files.
        about: where and how it was made.
        found: what was measured.
        more: further entries of the JSON file.
        rows, tables: further ones behind those of `found`.
    """
    figures = [figure for one in found for figure in one.figures]
    own, shown = [figure.as_dict() for figure in figures], [figure_table(figures)]
    commit = f"commit {about['commit'] or 'unknown'}"
    said = [f"{heading(about)}; {commit}."]
    for one in found:
        own += [{"kind": "step", "model": one.label} | row for row in one.steps.rows]
        shown += [step_table(one.label, one.steps), case_table(one.case), stage_table(one.label, one.case)]
        said += [f"{one.label}: runner {one.about['runner']}.", *(f"{one.label}: {r}" for r in remarks(one.case))]

    def draw(figure: Any) -> None:
        figure.set_size_inches(13, 4.8)
        left, right = figure.subplots(1, 2)
        draw_targets(left, figures)
        draw_steps(right, [(one.label, one.steps) for one in found])

    made = {fact: about[fact] for fact in MADE}
    facts = {"about": about, "rows": [row | made for row in (*own, *rows)]} | more
    return Report(name, f"{heading(about)}; {commit}", facts, [*shown, *tables], said, draw)
