"""The figures of `bench speed` and `bench gpu`: ratios of timed steps and timed answers, next to their targets.

Some figures have no target. The targets of an inflated model on a CPU are those of 400M parameters in float32 on two
cores, the targets of a GPU those of llama-7b's shape in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftree.bench.case import Result
from draftree.bench.kit import (
    ASSISTED,
    COMPILED,
    LIMITED,
    NODES,
    PLAIN,
    PROMPT_LOOKUP,
    REFERENCE,
    SMALL,
    WARM,
    label_of,
)  # fmt: skip
from draftree.bench.pictures import BEST as GREEN
from draftree.bench.pictures import THEIRS, plain_axis
from draftree.bench.report import Table
from draftree.bench.samples import Sample
from draftree.bench.steps import HF, LABELS, LOOP, Steps
from draftree.bench.summary import Estimate, shown

DRAFTING = (SMALL, WARM, f"{WARM}+{SMALL}", LIMITED)
OUTSIDE = ("draft", "accept", "commit")  # stages of a step outside the pass; the shape's work is part of the first
WIDEST = 3.0  # times its target, beyond which a bar is not drawn longer

OVER_HF, OVER_COMPILED = "plain decoding / HF generate", "plain decoding / HF static + compile"
STEP_FLOOR, TOKEN_FLOOR = "memory floor / plain step", "memory floor / plain token"
EFFICIENCY = f"overhead efficiency, trees of up to {NODES} nodes"
EFFICIENCY_BEHIND = "the same, without prompts' passes"
SHARE = "draft + shape + accept + commit, share of a step"
BEST = "best drafter / HF generate"
AT_LEAST, AT_MOST = ">=", "<="
TARGETS: dict[str, dict[str, tuple[str, float]]] = {
    "embedded": {OVER_HF: (AT_LEAST, 2.0), OVER_COMPILED: (AT_LEAST, 1.2), BEST: (AT_LEAST, 4.0)},
    "inflated": {
        **{STEP_FLOOR: (AT_LEAST, 0.9), TOKEN_FLOOR: (AT_LEAST, 0.9), "16-row step / 1-row step": (AT_MOST, 1.6)},
        **{EFFICIENCY: (AT_LEAST, 0.85), EFFICIENCY_BEHIND: (AT_LEAST, 0.85), SHARE: (AT_MOST, 0.05)},
        BEST: (AT_LEAST, 2.2),
    },
    "gpu": {
        **{STEP_FLOOR: (AT_LEAST, 1 / 1.2), "64-row step / 1-row step": (AT_MOST, 1.15)},
        **{EFFICIENCY: (AT_LEAST, 0.9), EFFICIENCY_BEHIND: (AT_LEAST, 0.9)},
    },
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a model.

    Attributes:
        model: its name in tables.
        name: of the figure.
        estimate: value and interval.
        sense, target: ">=" or "<=", and the target; "" and None where there is none.
        of: what the figure is of, where that is not in its name.
    """

    model: str
    name: str
    estimate: Estimate
    sense: str = ""
    target: float | None = None
    of: str = ""

    @property
    def part(self) -> float | None:
        """The part of the target that is reached: 1 and more where it is reached; None where there is no target."""
        if self.target is None:
            return None
        value = self.estimate.value
        return value / self.target if self.sense == AT_LEAST else self.target / max(value, 1e-9)

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        return None if self.part is None else self.part >= 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"kind": "figure", "reached": self.reached}


def figures_of(kind: str, model: str, steps: Steps, case: Result) -> list[Figure]:
    """All figures of one model.

    Args:
        kind: "embedded", "inflated" or "gpu": which targets it has.
        model: its name in tables.
        steps: timed ones.
        case: the answers, of one interleaved run.
    """
    found: list[Figure] = []

    def add(name: str, estimate: Estimate | float, of: str = "") -> None:
        sense, target = TARGETS[kind].get(name, ("", None))
        estimate = estimate if isinstance(estimate, Estimate) else Estimate(float(estimate))
        found.append(Figure(model, name, estimate, sense, target, of))

    over = {name: row.over[REFERENCE] for name, row in case.rows.items()}
    timed = {(row["method"], row["rows"]): row for row in steps.rows}
    add(OVER_HF, over[PLAIN])
    if COMPILED in case.rows:
        add(OVER_COMPILED, case.rows[COMPILED].over[PLAIN].inverse())
    add(STEP_FLOOR, timed[LOOP, 1]["floor_share"])
    add(TOKEN_FLOOR, steps.floor["seconds"] * _decoding_speed(case.samples, PLAIN))
    for method, whose in ((LOOP, ""), (HF, ", HF forward")):
        for (name, count), row in timed.items():
            if name == method and count > 1:
                add(f"{count}-row step / 1-row step{whose}", row["over_one_row"])
    limited = case.rows.get(LIMITED)
    if limited is not None and limited.stats is not None:
        stats, length = limited.stats, limited.stats.acceptance_length
        add(EFFICIENCY, limited.over[PLAIN].times(1 / length), f"acceptance length {length:.2f}")
        speed_up = _decoding_speed(case.samples, LIMITED) / _decoding_speed(case.samples, PLAIN)
        add(EFFICIENCY_BEHIND, speed_up / length)
        prompts = sum(sample.answer.prompt_verify for sample in case.samples if sample.method == LIMITED)
        outside = sum(stats.seconds[stage] for stage in OUTSIDE)
        add(SHARE, outside / (outside + stats.seconds["verify"] - prompts))
    for name in (PROMPT_LOOKUP, ASSISTED):
        if name in over:
            add(f"{label_of(name)} / HF generate", over[name])
    best = max((name for name in DRAFTING if name in over), key=lambda name: over[name].value, default=None)
    if best is not None:
        add(BEST, over[best], label_of(best))
    return found


def _decoding_speed(samples: Sequence[Sample], method: str) -> float:
    """Tokens a second of a method of draftree, without the prompt's pass and the token that it gives."""
    answers = [sample.answer for sample in samples if sample.method == method]
    tokens = sum(len(answer.ids) - 1 for answer in answers)
    return tokens / sum(answer.seconds - answer.prompt_verify for answer in answers)


def figure_table(figures: Sequence[Figure]) -> Table:
    """Figures and their targets."""
    lines = []
    for figure in figures:
        target = "" if figure.target is None else f"{figure.sense} {figure.target:.3g}"
        reached = {None: "", True: "reached", False: "short"}[figure.reached]
        name = f"{figure.name} ({figure.of})" if figure.of else figure.name
        lines.append((figure.model, name, shown(figure.estimate, "{:.2f}"), target, reached))
    return Table("Figures and their targets", ("model", "figure", "value", "target", ""), lines)


def step_table(model: str, steps: Steps) -> Table:
    """Timed steps, in milliseconds and over one row."""
    held = {(row["method"], row["rows"]): row for row in steps.rows}
    methods = list(dict.fromkeys(row["method"] for row in steps.rows))
    lines = []
    for count in sorted({row["rows"] for row in steps.rows}):
        own = [held.get((name, count)) for name in methods]
        cells = ["" if r is None else f"{1000 * r['seconds']:.2f} ({r['over_one_row']:.2f})" for r in own]
        lines.append((str(count), *cells, f"{held[LOOP, count]['floor_share']:.2f}"))
    floor = steps.floor
    title = (
        f"Milliseconds of a step, {model} (over one row); floor: {floor['weight_bytes'] / 1e9:.3f} GB of weights at "
        f"{floor['bandwidth'] / 1e9:.1f} GB/s, {1000 * floor['seconds']:.2f} ms"
    )
    return Table(title, ("rows", *(LABELS[name] for name in methods), "floor / draftree"), lines)


def draw_targets(axis: Any, figures: Sequence[Figure]) -> None:
    """The part of its target that each figure reaches."""
    parts = {figure: min(figure.part, WIDEST) for figure in figures if figure.part is not None}
    colours = [GREEN if part >= 1 else "#c8793a" for part in parts.values()]
    axis.barh(range(len(parts)), list(parts.values()), color=colours, height=0.6)
    axis.axvline(1, color="0.25", linewidth=1)
    axis.set_yticks(range(len(parts)), [f"{figure.model}: {figure.name}" for figure in parts])
    axis.invert_yaxis()
    for y, (figure, part) in enumerate(parts.items()):
        value = f" {figure.estimate.value:.2f} ({figure.sense} {figure.target:.3g})"
        axis.text(max(part, 1.02), y, value, va="center", fontsize=7)
    axis.set_xlim(0, 1.35 * max([*parts.values(), 1.0]))
    plain_axis(axis, "Part of the target that is reached", "1 and more: reached", "")


def draw_steps(axis: Any, models: Sequence[tuple[str, Steps]]) -> None:
    """Milliseconds of a step by its rows, and the memory's floor."""
    for (label, steps), line in zip(models, ("-", "--"), strict=False):
        for method in dict.fromkeys(row["method"] for row in steps.rows):
            held = [(row["rows"], 1000 * row["seconds"]) for row in steps.rows if row["method"] == method]
            colour = {HF: THEIRS, LOOP: GREEN}.get(method)
            axis.plot(*zip(*held, strict=True), line, marker="o", color=colour, label=f"{LABELS[method]}, {label}")
        axis.axhline(1000 * steps.floor["seconds"], color="0.25", linestyle=":", label=f"weights read once, {label}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    plain_axis(axis, "A step", "rows of a step", "milliseconds")
