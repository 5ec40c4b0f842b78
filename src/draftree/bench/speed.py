"""`draftree bench speed`: how far the engine is from the machine's limits, and from what one would use instead.

Two models, the embedded one (or the one that is named) and one inflated from it, are measured alike: steps by their
rows against the memory's speed, and answers of all methods in one interleaved run. The figures made of that stand
beside the wanted ones. The trie is warmed once, by the small model, since both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftree.bench.case import Result, Settings, Texts, encode_all, run_case, teach
from draftree.bench.figures import (
    DRAFTING,
    Figure,
    case_lines,
    differing,
    draw_steps,
    draw_wanted,
    figure_lines,
    figures_of,
    step_lines,
)
from draftree.bench.findings import Findings
from draftree.bench.inflate import Size, inflate
from draftree.bench.kit import ASSISTED, COMPILED, PLAIN, PROMPT_LOOKUP, REFERENCE, Kit
from draftree.bench.machine import describe, now
from draftree.bench.measure import Task
from draftree.bench.report import MOST_DISTURBED
from draftree.bench.steps import Steps, check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import open_runner

ROWS = (1, 2, 4, 8, 16, 32)
STEPS_OFTEN = 5  # times as many rounds of the small model's steps, which are short
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED, PLAIN, *DRAFTING)


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """How much to measure.

    Attributes:
        per_set: prompts of every set that the small model answers.
        answers: how many of them the inflated one answers.
        max_new_tokens: most tokens of an answer.
        rounds: how often a step of each kind is timed.
        context: tokens before its rows.
        warm_per_set: prompts of every set that warm the trie.
        compiled: whether to measure Hugging Face's static cache with torch.compile.
    """

    per_set: int = 1
    answers: int = 4
    max_new_tokens: int = 48
    rounds: int = 3
    context: int = 128
    warm_per_set: int = 23
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of one model."""

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
        settings: see there.
        params: inflate it to about so many parameters; None leaves the inflated model out.
        name: of the small model, None for the embedded one.
        watcher: shows progress.

    Raises:
        ValueError: a size that cannot be made, a prompt or context that does not fit, before any work.
    """
    watcher = watcher or Watcher()
    check_context(settings.context, ROWS[-1], getattr(small.config, "max_position_embeddings", None))
    asked = Settings(settings.per_set, settings.max_new_tokens, 1, settings.warm_per_set, settings.compiled)
    texts = encode_all(small, tokenizer, prompts, asked)
    about = describe(small, name) | {"started": now()}
    watcher.stage("inflating", None)
    large = None if params is None else inflate(small, params)
    warm = teach(small, tokenizer, texts, asked, watcher)

    def measured(label: str, kind: str, model: Any, texts: Texts) -> _Measured:
        runner = open_runner(model)
        often = settings.rounds * (STEPS_OFTEN if kind == "embedded" else 1)
        steps = time_rows(model, runner, ROWS, settings.context, often, watcher)
        names = [name for name in METHODS if settings.compiled or name != COMPILED]
        inflated_from = None if model is small else small
        kit = Kit(model, asked.max_new_tokens, warm=warm, compiled=settings.compiled, small=inflated_from)
        case = run_case(kit, tokenizer, texts, asked, names, name=name, watcher=watcher, part=f"{label}: ")
        size = Size.of(model.config)
        facts = case.about | {"runner": runner.form, "size": asdict(size) | {"parameters": size.parameters}}
        return _Measured(label, facts, steps, case, figures_of(kind, label, steps, case))

    found = [measured("embedded" if name is None else "small", "embedded", small, texts)]
    if params is not None:
        about["model"] += f" and inflated to {params}"
        few = replace(texts, tasks=spread(texts.tasks, settings.answers))
        found.append(measured(params, "inflated", large, few))
    about |= {"finished": now(), "settings": asdict(settings), "prompts": len(texts.tasks)}
    return _findings(found, about | {"sets": list(dict.fromkeys(task.prompt.set for task in texts.tasks))})


def _findings(found: Sequence[_Measured], about: dict[str, Any]) -> Findings:
    figures = [figure for one in found for figure in one.figures]
    rows, tables, remarks = [figure.as_dict() for figure in figures], [figure_lines(figures)], []
    for one in found:
        tables += [step_lines(one.label, one.steps), case_lines(one.label, one.case)]
        rows += [{"kind": "step", "model": one.label} | row for row in one.steps.rows]
        remarks += [f"{one.label}: runner {one.about['runner']}.", differing(one.label, one.case)]
        slow, compared = one.case.disturbed
        if slow > MOST_DISTURBED * compared:
            remarks.append(f"{one.label}: the machine was not quiet.")

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        draw_wanted(left, figures)
        draw_steps(right, [(one.label, one.steps) for one in found])

    models = {o.label: {"about": o.about, "floor": o.steps.floor, "answers": o.case.as_dict()} for o in found}
    return Findings("speed", about, rows, tables, draw, remarks, {"models": models})


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` tasks or all, evenly from the whole list, so that they are of as many sets as can be."""
    count = min(count, len(tasks))
    return [tasks[i * len(tasks) // count] for i in range(count)]
