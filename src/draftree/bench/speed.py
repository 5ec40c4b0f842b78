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

from draftree.bench.case import Result, Settings, Texts, encode_all, make_kit, run_case
from draftree.bench.figures import (
    DRAFTING,
    Figure,
    case_lines,
    differing,
    draw_steps,
    draw_targets,
    figure_lines,
    figures_of,
    step_lines,
)
from draftree.bench.findings import Findings
from draftree.bench.inflate import Size, inflate
from draftree.bench.kit import ASSISTED, COMPILED, PLAIN, PROMPT_LOOKUP, REFERENCE, Kit
from draftree.bench.machine import describe, now
from draftree.bench.measure import Task
from draftree.bench.report import is_disturbed
from draftree.bench.steps import Steps, check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import Runner, open_runner

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
    small: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: SpeedSettings,
    *,
    params: str | None = "400M",
    name: str | None = None,
    watcher: Watcher | None = None,
) -> Findings:
    """Measure.

    Args:
        small: a llama, mistral or qwen2 model on the CPU.
        tokenizer: its tokenizer.
        prompts: to measure on and to warm the trie with.
        settings: how much.
        params: inflate it to about so many parameters; None leaves the inflated model out.
        name: of the small model, None for the embedded one.
        watcher: shows progress.

    Raises:
        ValueError: a size that cannot be made, a prompt or context that does not fit, before any work.
    """
    watcher = watcher or Watcher()
    check_context(settings.context, ROWS[-1], getattr(small.config, "max_position_embeddings", None))
    texts = encode_all(small, tokenizer, prompts, settings.case)
    about = describe(small, name) | {"started": now()}
    watcher.stage("inflating", None)
    large = None if params is None else inflate(small, params)
    kit = make_kit(small, tokenizer, texts, settings.case, watcher)

    def measured(label: str, kind: str, kit: Kit, texts: Texts, rounds: int) -> Measured:
        runner = open_runner(kit.model)
        steps = time_rows(kit.model, runner, ROWS, settings.context, rounds, watcher)
        return measure_answers(label, kind, kit, runner, steps, tokenizer, texts, settings, METHODS, name, watcher)

    found = [measured("embedded" if name is None else "small", "embedded", kit, texts, SMALL_ROUNDS * settings.rounds)]
    if params is not None:
        about["model"] += f" and inflated to {params}"
        few = replace(texts, tasks=spread(texts.tasks, settings.answers))
        kit = replace(kit, model=large, small=small, size=params)
        found.append(measured(params, "inflated", kit, few, settings.rounds))
    about |= {"finished": now(), "settings": asdict(settings), "prompts": len(texts.tasks)}
    about["sets"] = list(dict.fromkeys(task.prompt.set for task in texts.tasks))
    models = {o.label: {"about": o.about, "floor": o.steps.floor, "answers": o.case.as_dict()} for o in found}
    return findings_of("speed", about, found, {"models": models})


def measure_answers(
    label: str,
    kind: str,
    kit: Kit,
    runner: Runner,
    steps: Steps,
    tokenizer: Any,
    texts: Texts,
    settings: SpeedSettings,
    names: Sequence[str],
    name: str | None,
    watcher: Watcher,
) -> Measured:
    """Answer `texts` with the methods `names` of a model whose `steps` were timed; `kind` chooses its targets."""
    names = [method for method in names if settings.compiled or method != COMPILED]
    part = f"{label}: "
    case = run_case(kit, tokenizer, texts, settings.case, names, name=name, watcher=watcher, part=part)
    size = Size.of(kit.model.config)
    about = case.about | {"runner": runner.form, "size": asdict(size) | {"parameters": size.parameters}}
    return Measured(label, about, steps, case, figures_of(kind, label, steps, case))


def findings_of(name: str, about: dict[str, Any], found: Sequence[Measured], more: dict[str, Any]) -> Findings:
    """Tables, rows, remarks and the picture of measured models; `name` and `more` as in `Findings`."""
    figures = [figure for one in found for figure in one.figures]
    rows, tables, remarks = [figure.as_dict() for figure in figures], [figure_lines(figures)], []
    for one in found:
        tables += [step_lines(one.label, one.steps), case_lines(one.label, one.case)]
        rows += [{"kind": "step", "model": one.label} | row for row in one.steps.rows]
        remarks += [f"{one.label}: runner {one.about['runner']}.", differing(one.label, one.case)]
        if is_disturbed(one.case):
            remarks.append(f"{one.label}: the machine was not quiet.")

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        draw_targets(left, figures)
        draw_steps(right, [(one.label, one.steps) for one in found])

    return Findings(name, about, rows, tables, draw, remarks, more)


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` tasks or all, evenly from the whole list, so that they are of as many sets as can be."""
    count = min(count, len(tasks))
    return [tasks[i * len(tasks) // count] for i in range(count)]
