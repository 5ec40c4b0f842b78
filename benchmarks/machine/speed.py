"""Figures of speed against the machine's limits and Hugging Face's ways of decoding, for the experiment `gpu`.

Steps by their rows are timed against the memory's speed, and answers of all methods in one interleaved run.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import kit as names
from benchmarks.harness.kit import Case
from benchmarks.harness.plots import method_colour, plain_axis
from benchmarks.machine.steps import HF, LABELS, LOOP, Steps
from draftree.bench.measure import Estimate
from draftree.bench.report import Table
from draftree.engine.request import STAGES
from draftree.pages import THEIRS

DRAFTING = (names.SMALL, names.WARM, f"{names.WARM}+{names.SMALL}", names.LIMITED)
COLUMNS = ("figure", "of", "value")
STEP_COLUMNS = ("rows", "method", "ms", "over_one_row", "floor_share")

OVER_HF, OVER_COMPILED = "plain decoding / HF generate", "plain decoding / HF static + compile"
STEP_FLOOR = "memory floor / plain step"
EFFICIENCY = f"overhead efficiency, trees of up to {names.NODES} nodes"
BEST, BEST_OVER_PLAIN = "best drafter / HF generate", "best drafter / plain decoding"


def figures_of(steps: Steps, case: Case) -> list[dict[str, Any]]:
    """Return all figures of one model, as rows of `COLUMNS`; "of" adds to a figure's name."""
    found: list[dict[str, Any]] = []

    def add(name: str, estimate: Estimate | float, of: str = "") -> None:
        estimate = estimate if isinstance(estimate, Estimate) else Estimate(float(estimate))
        found.append({"figure": name, "of": of or None, **estimate.columns("value")})

    over = {name: row.over[names.REFERENCE] for name, row in case.rows.items()}
    timed = {(row["name"], row["rows"]): row for row in steps.rows}
    add(OVER_HF, over[names.PLAIN])
    if names.COMPILED in case.rows:
        over_plain = case.rows[names.COMPILED].over[names.PLAIN]
        ends = (over_plain.high, over_plain.low)
        add(OVER_COMPILED, Estimate(1 / over_plain.value, *(None if end is None else 1 / end for end in ends)))
    add(STEP_FLOOR, timed[LOOP, 1]["floor_share"])
    for method, whose in ((LOOP, ""), (HF, ", HF forward")):
        for (name, count), row in timed.items():
            if name == method and count > 1:
                add(f"{count}-row step / 1-row step{whose}", row["over_one_row"])
    limited = case.rows.get(names.LIMITED)
    if limited is not None and limited.stats is not None:
        length = limited.stats.acceptance_length
        own = limited.over[names.PLAIN]
        scaled = (None if end is None else end / length for end in (own.low, own.high))
        add(EFFICIENCY, Estimate(own.value / length, *scaled), f"acceptance length {length:.2f}")
    for name in (names.PROMPT_LOOKUP, names.ASSISTED):
        if name in over:
            add(f"{names.label_of(name)} / HF generate", over[name])
    best = max((name for name in DRAFTING if name in over), key=lambda name: over[name].value, default=None)
    if best is not None:
        add(BEST, over[best], names.label_of(best))
        add(BEST_OVER_PLAIN, case.rows[best].over[names.PLAIN], names.label_of(best))
    return found


def step_table(steps: Steps) -> Table:
    """Return the timed steps, in milliseconds and over one row."""
    floor = steps.floor
    title = (
        f"Milliseconds of a step; floor: {floor['weight_bytes'] / 1e9:.3f} GB of weights at "
        f"{floor['bandwidth'] / 1e9:.1f} GB/s, {1000 * floor['seconds']:.2f} ms"
    )
    return Table(title, steps.rows, STEP_COLUMNS)


def draw_steps(figure: Any, steps: Steps) -> None:
    """Draw the milliseconds of the steps by their rows."""
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


def stage_table(case: Case) -> Table:
    """Return microseconds a token by stage, of draftree's methods."""
    rows = [
        {"method": names.label_of(name)} | {stage: 1e6 * row.stats.seconds[stage] / row.tokens for stage in STAGES}
        for name, row in case.rows.items()
        if row.stats is not None
    ]
    return Table("Microseconds a token by stage", rows, ("method", *STAGES))
