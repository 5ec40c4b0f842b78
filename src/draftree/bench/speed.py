"""`draftree bench speed`: how far the engine is from the machine's limits, and from Hugging Face's ways of decoding.

Steps by their rows are timed against the memory's speed, and answers of all methods in one interleaved run. Figures are
made of both. The experiment `gpu` measures with the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftree.bench import figures
from draftree.bench.case import Result, run_case
from draftree.bench.case_report import case_table, remarks, stage_table
from draftree.bench.inputs import Settings, Subject, Texts, encode_all
from draftree.bench.kit import Kit, make_kit
from draftree.bench.names import ASSISTED, COMPILED, PLAIN, PROMPT_LOOKUP, REFERENCE
from draftree.bench.report import Report, Table
from draftree.bench.steps import LOOP, Steps, check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import open_runner

ROWS = (1, 2, 4, 8, 16, 32)
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED, PLAIN, *figures.DRAFTING)


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
    return measure_answers(kit, steps, texts, METHODS, watcher)[0]


def measure_answers(
    kit: Kit, steps: Steps, texts: Texts, names: Sequence[str], watcher: Watcher
) -> tuple[Report, Result]:
    """Answer `texts` with methods of a model whose `steps` were timed: its figures, and the case behind them."""
    names = [method for method in names if kit.settings.compiled or method != COMPILED]
    case = run_case(kit, texts, names, watcher)
    runner, parameters = open_runner(kit.model).form, sum(weight.numel() for weight in kit.model.parameters())
    case.about.update({"runner": runner, "parameters": parameters})
    rows = figures.figures_of(steps, case)
    lines = [*remarks(case), f"Runner: {runner}."]
    if all(len(sample.answer.ids) < 2 for sample in case.samples):
        lines.append("Every answer is a single token, which the prompt's pass gives: figures of decoding are left out.")
    report = Report(
        "speed",
        "Speed against the machine's limits and Hugging Face's ways",
        case.about,
        [
            Table("Figures", rows, figures.COLUMNS),
            *(figures.step_table(steps), case_table(case), stage_table(case)),
        ],
        lines,
        {"floor": steps.floor} | case.facts(),
        lambda figure: figures.draw(figure, steps),
    )
    return report, case
