"""The figures of `bench speed` and `bench gpu`: ratios of timed steps and timed answers, each beside the wanted one.

A figure that nothing is asked of is shown without a target. Those of an inflated model on a CPU are asked of one of
400M parameters in float32 on two cores, those of a GPU of llama-7b's shape in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftree.bench.case import Result
from draftree.bench.findings import Lines
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
)
from draftree.bench.measure import Sample
from draftree.bench.pictures import BEST as GREEN
from draftree.bench.pictures import THEIRS, plain_axis
from draftree.bench.steps import HF, LABELS, LOOP, Steps
from draftree.bench.summary import Estimate, shown
from draftree.engine.stats import STAGES

DRAFTING = (SMALL, WARM, f"{WARM}+{SMALL}", LIMITED)
OUTSIDE = ("draft", "accept", "commit")  # stages of a step that are no pass; the shape's work is in the first
WIDEST = 3.0  # of what is wanted, that bars show

OVER_HF, OVER_COMPILED = "plain decoding / HF generate", "plain decoding / HF static + compile"
STEP_FLOOR, TOKEN_FLOOR = "memory floor / plain step", "memory floor / plain token"
EFFICIENCY = f"overhead efficiency, trees of up to {NODES} nodes"
EFFICIENCY_BEHIND = "the same, without prompts' passes"
SHARE = "draft + shape + accept + commit, share of a step"
BEST = "best drafter / HF generate"
WANTED: dict[str, dict[str, tuple[str, float]]] = {
    "embedded": {OVER_HF: (">=", 2.0), OVER_COMPILED: (">=", 1.2), BEST: (">=", 4.0)},
    "inflated": {
        **{STEP_FLOOR: (">=", 0.9), TOKEN_FLOOR: (">=", 0.9), "16-row step / 1-row step": ("<=", 1.6)},
        **{EFFICIENCY: (">=", 0.85), EFFICIENCY_BEHIND: (">=", 0.85), SHARE: ("<=", 0.05), BEST: (">=", 2.2)},
    },
    "gpu": {
        **{STEP_FLOOR: (">=", 1 / 1.2), "64-row step / 1-row step": ("<=", 1.15)},
        **{EFFICIENCY: (">=", 0.9), EFFICIENCY_BEHIND: (">=", 0.9)},
    },
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a model.

    Attributes:
        model: its name in tables.
        name: of the figure.
        estimate: value and interval.
        sense, wanted: ">=" or "<=", and what is asked for; "" and None where nothing is.
        of: what the figure is of, where that is not in its name.
    """

    model: str
    name: str
    estimate: Estimate
    sense: str = ""
    wanted: float | None = None
    of: str = ""

    @property
    def part_of_wanted(self) -> float | None:
        """How much of what is asked for is reached: 1 and more where it is; None where nothing is asked."""
        if self.wanted is None:
            return None
        value = self.estimate.value
        return value / self.wanted if self.sense == ">=" else self.wanted / max(value, 1e-9)

    @property
    def reached(self) -> bool | None:
        """Whether it is what is asked for; None where nothing is."""
        return None if self.part_of_wanted is None else self.part_of_wanted >= 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"kind": "figure", "reached": self.reached}


def figures_of(kind: str, model: str, steps: Steps, case: Result) -> list[Figure]:
    """All figures of one model.

    Args:
        kind: "embedded", "inflated" or "gpu": what is wanted of it.
        model: its name in tables.
        steps: timed ones.
        case: the answers, of one interleaved run.
    """
    rows = case.rows
    over = {name: row.over[REFERENCE] for name, row in rows.items()}
    found: list[tuple[str, Estimate, str]] = [(OVER_HF, over[PLAIN], "")]
    if COMPILED in rows:
        found.append((OVER_COMPILED, _inverse(rows[COMPILED].over[PLAIN]), ""))
    held = {(row["method"], row["rows"]): row for row in steps.rows}
    found.append((STEP_FLOOR, _alone(held[LOOP, 1]["floor_share"]), ""))
    found.append((TOKEN_FLOOR, _alone(steps.floor["seconds"] * _rate(case.samples, PLAIN)), ""))
    for method, whose in ((LOOP, ""), (HF, ", HF forward")):
        for (name, n), row in held.items():
            if name == method and n > 1:
                found.append((f"{n}-row step / 1-row step{whose}", _alone(row["over_one_row"]), ""))
    if LIMITED in rows:
        stats = rows[LIMITED].stats
        assert stats is not None
        length = stats.acceptance_length
        found.append((EFFICIENCY, _scaled(rows[LIMITED].over[PLAIN], 1 / length), f"acceptance length {length:.2f}"))
        behind = _rate(case.samples, LIMITED) / _rate(case.samples, PLAIN) / length
        found.append((EFFICIENCY_BEHIND, _alone(behind), ""))
        read = sum(sample.answer.prompt_verify for sample in case.samples if sample.method == LIMITED)
        outside = sum(stats.seconds[stage] for stage in OUTSIDE)
        found.append((SHARE, _alone(outside / (outside + stats.seconds["verify"] - read)), ""))
    found += [(f"{label_of(n)} / HF generate", over[n], "") for n in (PROMPT_LOOKUP, ASSISTED) if n in rows]
    best = max((name for name in DRAFTING if name in rows), key=lambda name: over[name].value, default=None)
    if best is not None:
        found.append((BEST, over[best], label_of(best)))
    wanted = WANTED[kind]
    figures = []
    for name, value, of in found:
        sense, target = wanted.get(name, ("", None))
        figures.append(Figure(model, name, value, sense, target, of))
    return figures


def figure_lines(figures: Sequence[Figure]) -> Lines:
    """A table of figures and what is wanted of them."""
    lines = []
    for figure in figures:
        target = "" if figure.wanted is None else f"{figure.sense} {figure.wanted:.3g}"
        facts = {None: "", True: "reached", False: "short"}[figure.reached]
        name = f"{figure.name} ({figure.of})" if figure.of else figure.name
        lines.append((figure.model, name, shown(figure.estimate, "{:.2f}"), target, facts))
    return "Figures and what is wanted of them", ("model", "figure", "value", "wanted", ""), lines


def step_lines(model: str, steps: Steps) -> Lines:
    """A table of timed steps, in milliseconds and over one row."""
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
    return title, ("rows", *(LABELS[name] for name in methods), "floor / draftree"), lines


def case_lines(model: str, case: Result) -> Lines:
    """A table of the answers' speeds, and of the time by stage of what is ours."""
    lines = []
    for name in case.names:
        row = case.rows.get(name)
        if row is None:
            lines.append((label_of(name), f"not measured: {case.unmeasured.get(name, '')}", *[""] * (2 + len(STAGES))))
            continue
        length = "" if row.stats is None else f"{row.stats.acceptance_length:.2f}"
        stages = ["" if row.stats is None else f"{1e6 * row.stats.seconds[s] / row.tokens:.0f}" for s in STAGES]
        lines.append(
            (label_of(name), shown(row.speed, "{:.1f}"), shown(row.over[REFERENCE], "{:.2f}"), length, *stages)
        )
    headings = ("method", "tokens/s", "over HF generate", "acceptance length", *(f"{stage}, us" for stage in STAGES))
    return f"Answers, {model}; microseconds a token by stage", headings, lines


def differing(model: str, case: Result) -> str:
    """A line that says whether all answers were Hugging Face's."""
    parted = {name: len(row.parted) for name, row in case.rows.items() if row.parted}
    if not parted:
        return f"{model}: all answers equal HF generate's."
    facts = ", ".join(f"{label_of(name)} {count} of {case.about['prompts']}" for name, count in parted.items())
    return f"{model}: answers that part from HF generate's: {facts}."


def draw_wanted(axis: Any, figures: Sequence[Figure]) -> None:
    """How much of what is wanted each figure reaches, 1 and more where it does."""
    asked = [figure for figure in figures if figure.part_of_wanted is not None]
    parts = [min(figure.part_of_wanted or 0.0, WIDEST) for figure in asked]
    axis.barh(range(len(asked)), parts, color=[GREEN if part >= 1 else "#c8793a" for part in parts], height=0.6)
    axis.axvline(1, color="0.25", linewidth=1)
    axis.set_yticks(range(len(asked)), [f"{figure.model}: {figure.name}" for figure in asked])
    axis.invert_yaxis()
    for y, (figure, part) in enumerate(zip(asked, parts, strict=True)):
        facts = f" {figure.estimate.value:.2f} ({figure.sense} {figure.wanted:.3g})"
        axis.text(max(part, 1.02), y, facts, va="center", fontsize=7)
    axis.set_xlim(0, 1.35 * max([*parts, 1.0]))
    plain_axis(axis, "Of what is wanted, reached", "1 and more: reached", "")


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


def _rate(samples: Sequence[Sample], method: str) -> float:
    """Tokens a second of a method of ours, the prompt's pass and the token that it gives left out."""
    own = [sample.answer for sample in samples if sample.method == method]
    tokens = sum(len(answer.ids) - 1 for answer in own)
    return tokens / sum(answer.seconds - answer.prompt_verify for answer in own)


def _alone(value: float) -> Estimate:
    return Estimate(float(value), None, None)


def _scaled(e: Estimate, factor: float) -> Estimate:
    low, high = e.low, e.high
    return Estimate(e.value * factor, None if low is None else low * factor, None if high is None else high * factor)


def _inverse(e: Estimate) -> Estimate:
    return Estimate(1 / e.value, None if e.high is None else 1 / e.high, None if e.low is None else 1 / e.low)
