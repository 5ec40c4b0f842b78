"""`draftree bench speed`: how far the engine is from the machine's limits, and from Hugging Face's ways of decoding.

Steps by their rows are timed against the memory's speed, and answers of all methods in one interleaved run. Figures are
ratios of both. The experiment `gpu` measures with the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.bench import names
from draftree.bench.case import Result, run_case
from draftree.bench.case_report import case_table, remarks, stage_table
from draftree.bench.inputs import Settings, Subject, Texts, encode_all
from draftree.bench.kit import Kit, make_kit
from draftree.bench.pictures import method_colour, plain_axis
from draftree.bench.report import Report, Table
from draftree.bench.samples import Sample
from draftree.bench.shares import Estimate
from draftree.bench.steps import HF, LABELS, LOOP, Steps, check_context, time_rows
from draftree.colours import THEIRS
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import open_runner

ROWS = (1, 2, 4, 8, 16, 32)
DRAFTING = (names.SMALL, names.WARM, f"{names.WARM}+{names.SMALL}", names.LIMITED)
METHODS = (names.REFERENCE, names.COMPILED, names.PROMPT_LOOKUP, names.ASSISTED, names.PLAIN, *DRAFTING)
OUTSIDE = ("draft", "accept", "commit")  # stages of a step outside the pass; the shape's work is part of the first
COLUMNS = ("figure", "of", "value")
STEP_COLUMNS = ("rows", "method", "ms", "over_one_row", "floor_share")

OVER_HF, OVER_COMPILED = "plain decoding / HF generate", "plain decoding / HF static + compile"
STEP_FLOOR, TOKEN_FLOOR = "memory floor / plain step", "memory floor / plain token"
EFFICIENCY = f"overhead efficiency, trees of up to {names.NODES} nodes"
EFFICIENCY_BEHIND = "the same, without prompts' passes"
SHARE = "draft + shape + accept + commit, share of a step"
BEST, BEST_OVER_PLAIN = "best drafter / HF generate", "best drafter / plain decoding"


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
    kit: Kit, steps: Steps, texts: Texts, methods: Sequence[str], watcher: Watcher
) -> tuple[Report, Result]:
    """Answer `texts` with methods of a model whose `steps` were timed: its figures, and the case behind them."""
    methods = [method for method in methods if kit.settings.compiled or method != names.COMPILED]
    case = run_case(kit, texts, methods, watcher)
    runner, parameters = open_runner(kit.model).form, sum(weight.numel() for weight in kit.model.parameters())
    case.about.update({"runner": runner, "parameters": parameters})
    rows = figures_of(steps, case)
    lines = [*remarks(case), f"Runner: {runner}."]
    if all(len(sample.answer.ids) < 2 for sample in case.samples):
        lines.append("Every answer is a single token, which the prompt's pass gives: figures of decoding are left out.")
    report = Report(
        "speed",
        "Speed against the machine's limits and Hugging Face's ways",
        case.about,
        [
            Table("Figures", rows, COLUMNS),
            *(step_table(steps), case_table(case), stage_table(case)),
        ],
        lines,
        {"floor": steps.floor} | case.facts(),
        lambda figure: draw_steps(figure, steps),
    )
    return report, case


def figures_of(steps: Steps, case: Result) -> list[dict[str, Any]]:
    """All figures of one model, as rows of `COLUMNS`; "of" is what a figure is of, where its name does not say it."""
    found: list[dict[str, Any]] = []

    def add(name: str, estimate: Estimate | float, of: str = "") -> None:
        estimate = estimate if isinstance(estimate, Estimate) else Estimate(float(estimate))
        found.append({"figure": name, "of": of or None, **estimate.columns("value")})

    over = {name: row.over[names.REFERENCE] for name, row in case.rows.items()}
    timed = {(row["name"], row["rows"]): row for row in steps.rows}
    add(OVER_HF, over[names.PLAIN])
    if names.COMPILED in case.rows:
        add(OVER_COMPILED, case.rows[names.COMPILED].over[names.PLAIN].inverse())
    add(STEP_FLOOR, timed[LOOP, 1]["floor_share"])
    plain, _ = _behind_prompts(case.samples, names.PLAIN)
    if plain:
        add(TOKEN_FLOOR, steps.floor["seconds"] * plain)
    for method, whose in ((LOOP, ""), (HF, ", HF forward")):
        for (name, count), row in timed.items():
            if name == method and count > 1:
                add(f"{count}-row step / 1-row step{whose}", row["over_one_row"])
    limited = case.rows.get(names.LIMITED)
    if limited is not None and limited.stats is not None:
        stats, length = limited.stats, limited.stats.acceptance_length
        add(EFFICIENCY, limited.over[names.PLAIN].times(1 / length), f"acceptance length {length:.2f}")
        if plain:
            speed, behind = _behind_prompts(case.samples, names.LIMITED)
            add(EFFICIENCY_BEHIND, speed / plain / behind)
            prompts = sum(sample.answer.prompt_verify for sample in case.samples if sample.method == names.LIMITED)
            outside = sum(stats.seconds[stage] for stage in OUTSIDE)
            add(SHARE, outside / (outside + stats.seconds["verify"] - prompts))
    for name in (names.PROMPT_LOOKUP, names.ASSISTED):
        if name in over:
            add(f"{names.label_of(name)} / HF generate", over[name])
    best = max((name for name in DRAFTING if name in over), key=lambda name: over[name].value, default=None)
    if best is not None:
        add(BEST, over[best], names.label_of(best))
        add(BEST_OVER_PLAIN, case.rows[best].over[names.PLAIN], names.label_of(best))
    return found


def _behind_prompts(samples: Sequence[Sample], method: str) -> tuple[float, float]:
    """Tokens a second and a step of a method of draftree, without prompts' passes; zeros where that leaves none."""
    answers = [sample.answer for sample in samples if sample.method == method]
    emitted = [step for answer in answers for step in answer.lengths[1:]]
    seconds = sum(answer.seconds - answer.prompt_verify for answer in answers)
    return (sum(emitted) / seconds, sum(emitted) / len(emitted)) if emitted else (0.0, 0.0)


def step_table(steps: Steps) -> Table:
    """Timed steps, in milliseconds and over one row."""
    floor = steps.floor
    title = (
        f"Milliseconds of a step; floor: {floor['weight_bytes'] / 1e9:.3f} GB of weights at "
        f"{floor['bandwidth'] / 1e9:.1f} GB/s, {1000 * floor['seconds']:.2f} ms"
    )
    return Table(title, steps.rows, STEP_COLUMNS)


def draw_steps(figure: Any, steps: Steps) -> None:
    """Milliseconds of the steps by their rows."""
    figure.set_size_inches(6.5, 4.8)
    axis = figure.subplots()
    for method in dict.fromkeys(row["name"] for row in steps.rows):
        held = [(row["rows"], row["ms"]) for row in steps.rows if row["name"] == method]
        colour = {HF: THEIRS, LOOP: method_colour(LOOP)}.get(method)
        axis.plot(*zip(*held, strict=True), "-o", color=colour, label=LABELS[method])
    axis.axhline(1000 * steps.floor["seconds"], color="0.25", linestyle=":", label="weights read once")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    plain_axis(axis, "A step", "rows of a step", "milliseconds")
