"""The figures of `bench speed` and the experiment `gpu`: ratios of timed steps and answers, next to their targets.

Some figures have no target. The targets of an inflated model are those of 400M parameters in float32 on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftree.bench import names
from draftree.bench.case import Result
from draftree.bench.pictures import method_colour, plain_axis
from draftree.bench.report import Table
from draftree.bench.samples import Sample
from draftree.bench.shares import Estimate
from draftree.bench.steps import HF, LABELS, LOOP, Steps
from draftree.colours import THEIRS

DRAFTING = (names.SMALL, names.WARM, f"{names.WARM}+{names.SMALL}", names.LIMITED)
OUTSIDE = ("draft", "accept", "commit")  # stages of a step outside the pass; the shape's work is part of the first
REACHED, MISSED = "#1d6fa5", "#c8793a"  # blue and orange, which nobody confuses
WIDEST = 3.0  # times its target, beyond which a bar is not drawn longer
COLUMNS = ("figure", "of", "value", "target", "part of target")
STEP_COLUMNS = ("rows", "method", "ms", "over_one_row", "floor_share")

OVER_HF, OVER_COMPILED = "plain decoding / HF generate", "plain decoding / HF static + compile"
STEP_FLOOR, TOKEN_FLOOR = "memory floor / plain step", "memory floor / plain token"
EFFICIENCY = f"overhead efficiency, trees of up to {names.NODES} nodes"
EFFICIENCY_BEHIND = "the same, without prompts' passes"
SHARE = "draft + shape + accept + commit, share of a step"
BEST, BEST_OVER_PLAIN = "best drafter / HF generate", "best drafter / plain decoding"
AT_LEAST, AT_MOST = ">=", "<="
Targets = Mapping[str, tuple[str, float]]  # by the figure's name, whether it is to be at least or at most how much
OF_EMBEDDED: Targets = {OVER_HF: (AT_LEAST, 2.0), OVER_COMPILED: (AT_LEAST, 1.2), BEST: (AT_LEAST, 4.0)}
OF_INFLATED: Targets = {
    **{STEP_FLOOR: (AT_LEAST, 0.9), TOKEN_FLOOR: (AT_LEAST, 0.9), "16-row step / 1-row step": (AT_MOST, 1.6)},
    **{EFFICIENCY: (AT_LEAST, 0.85), EFFICIENCY_BEHIND: (AT_LEAST, 0.85), SHARE: (AT_MOST, 0.05)},
    BEST: (AT_LEAST, 2.2),
}


def figures_of(targets: Targets, steps: Steps, case: Result) -> list[dict[str, Any]]:
    """All figures of one model, as rows of `COLUMNS`.

    "of" is what a figure is of, where its name does not say it; "part of target" is 1 or more where the target is
    reached, and None where there is none.
    """
    found: list[dict[str, Any]] = []

    def add(name: str, estimate: Estimate | float, of: str = "") -> None:
        estimate = estimate if isinstance(estimate, Estimate) else Estimate(float(estimate))
        entry = {"figure": name, "of": of or None, **estimate.columns("value")}
        found.append(entry | reached(estimate.value, *targets.get(name, ("", None))))

    over = {name: row.over[names.REFERENCE] for name, row in case.rows.items()}
    timed = {(row["name"], row["rows"]): row for row in steps.rows}
    add(OVER_HF, over[names.PLAIN])
    if names.COMPILED in case.rows:
        add(OVER_COMPILED, case.rows[names.COMPILED].over[names.PLAIN].inverse())
    add(STEP_FLOOR, timed[LOOP, 1]["floor_share"])
    add(TOKEN_FLOOR, steps.floor["seconds"] * _decoding_speed(case.samples, names.PLAIN))
    for method, whose in ((LOOP, ""), (HF, ", HF forward")):
        for (name, count), row in timed.items():
            if name == method and count > 1:
                add(f"{count}-row step / 1-row step{whose}", row["over_one_row"])
    limited = case.rows.get(names.LIMITED)
    if limited is not None and limited.stats is not None:
        stats, length = limited.stats, limited.stats.acceptance_length
        add(EFFICIENCY, limited.over[names.PLAIN].times(1 / length), f"acceptance length {length:.2f}")
        speed_up = _decoding_speed(case.samples, names.LIMITED) / _decoding_speed(case.samples, names.PLAIN)
        add(EFFICIENCY_BEHIND, speed_up / length)
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


def reached(value: float, sense: str, target: float | None) -> dict[str, Any]:
    """The target as tables show it, and the part of it that `value` reaches."""
    if target is None:
        return {"target": None, "part of target": None}
    part = value / target if sense == AT_LEAST else target / max(value, 1e-9)
    return {"target": f"{sense} {target:.3g}", "part of target": part}


def _decoding_speed(samples: Sequence[Sample], method: str) -> float:
    """Tokens a second of a method of draftree, without the prompt's pass and the token that it gives."""
    answers = [sample.answer for sample in samples if sample.method == method]
    tokens = sum(len(answer.ids) - 1 for answer in answers)
    return tokens / sum(answer.seconds - answer.prompt_verify for answer in answers)


def step_table(steps: Steps) -> Table:
    """Timed steps, in milliseconds and over one row."""
    floor = steps.floor
    title = (
        f"Milliseconds of a step; floor: {floor['weight_bytes'] / 1e9:.3f} GB of weights at "
        f"{floor['bandwidth'] / 1e9:.1f} GB/s, {1000 * floor['seconds']:.2f} ms"
    )
    return Table(title, steps.rows, STEP_COLUMNS)


def draw(figure: Any, figures: Sequence[Mapping[str, Any]], steps: Steps) -> None:
    """The part of its target that each figure reaches, where there are targets, and the steps."""
    aimed = [row for row in figures if row["target"] is not None]
    figure.set_size_inches(13 if aimed else 6.5, 4.8)
    *left, right = figure.subplots(1, 2 if aimed else 1, squeeze=False)[0]
    if aimed:
        _draw_targets(left[0], aimed)
    _draw_steps(right, steps)


def _draw_targets(axis: Any, figures: Sequence[Mapping[str, Any]]) -> None:
    parts = [min(row["part of target"], WIDEST) for row in figures]
    axis.barh(range(len(parts)), parts, color=[REACHED if part >= 1 else MISSED for part in parts], height=0.6)
    axis.axvline(1, color="0.25", linewidth=1)
    axis.set_yticks(range(len(parts)), [row["figure"] for row in figures])
    axis.invert_yaxis()
    for y, (row, part) in enumerate(zip(figures, parts, strict=True)):
        axis.text(max(part, 1.02), y, f" {row['value']:.2f} ({row['target']})", va="center", fontsize=7)
    axis.set_xlim(0, 1.35 * max([*parts, 1.0]))
    plain_axis(axis, "Part of the target that is reached", "1 and more: reached", "")


def _draw_steps(axis: Any, steps: Steps) -> None:
    for method in dict.fromkeys(row["name"] for row in steps.rows):
        held = [(row["rows"], row["ms"]) for row in steps.rows if row["name"] == method]
        colour = {HF: THEIRS, LOOP: method_colour(LOOP)}.get(method)
        axis.plot(*zip(*held, strict=True), "-o", color=colour, label=LABELS[method])
    axis.axhline(1000 * steps.floor["seconds"], color="0.25", linestyle=":", label="weights read once")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    plain_axis(axis, "A step", "rows of a step", "milliseconds")
