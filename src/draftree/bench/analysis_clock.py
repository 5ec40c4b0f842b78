"""What drafters inside the model bring in time: rows, step time and acceptance length beside tokens a second.

Where a step with a tree takes r times a plain one and its acceptance length is l, decoding is l / r times as fast. On
a model whose plain step is short, both what a drafter attaches and what it does between passes weigh in r; so small
trees are looked at, with as many rows of the drafter's own as it wants and with those of the root alone, and the
trees that the engine sizes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from draftree.bench.analysis_acceptance import PLAIN, Counted, WithTree
from draftree.bench.analysis_setup import Findings, Setup, Subject, bounds, plain_axis
from draftree.bench.analysis_trees import BEST_FIRST, Case, cases_of, with_tree
from draftree.bench.harness import Sample, measure, ready
from draftree.bench.methods import HuggingFace, Method
from draftree.bench.summary import Row, count_disturbed, find_differences, shown, summarise
from draftree.drafting.in_model import InModelDrafter
from draftree.shaping import Fixed

HF = "hf_generate"
ROUNDS = 2
SIZED = "sized by cost"  # the engine's own choice
BY_COST, ROOT = "by cost", "root"  # how many guesses, and which nodes look ahead
MARKERS = {BY_COST: "*", ROOT: "^"}


@dataclass(frozen=True, slots=True)
class Clocked:
    """One way of decoding.

    Attributes:
        subject: the drafter; None without one.
        case: its tree; None where there is none.
        row: speed, ratios and counts.
        rows: of a step.
        seconds: of a step, drafting and reading guesses included.
    """

    subject: Subject | None
    case: Case | None
    row: Row
    rows: float
    seconds: float

    @property
    def name(self) -> str:
        """The drafter's name, or that of the way without one."""
        return "plain" if self.subject is None else self.subject.name

    @property
    def length(self) -> float:
        """Tokens of a step."""
        return 1.0 if self.row.stats is None else self.row.stats.acceptance_length

    @property
    def over_plain(self) -> float:
        """Speed over plain decoding."""
        return self.row.over[PLAIN].value


def wall_clock(setup: Setup) -> Findings:
    """Tokens a second of every drafter with small trees, beside plain decoding and Hugging Face's `generate`."""
    chosen = [(s, case) for s in setup.subjects for case in clocked_cases(s.trained, setup.settings.budgets)]
    new = setup.settings.max_new_tokens
    methods: list[Method] = [HuggingFace(HF, "HF generate", setup.model, new)]
    methods.append(WithTree(PLAIN, setup.model, new, lambda: None))
    for i, (subject, case) in enumerate(chosen):
        make = lambda s=subject, c=case: _made(s.trained, c)  # noqa: E731
        methods.append(WithTree(str(i), setup.model, new, make))
    setup.watcher.stage("first calls", None)
    ready(methods, setup.tasks)
    setup.watcher.stage("decoding", len(methods) * len(setup.tasks) * ROUNDS)
    samples = measure(methods, setup.tasks, ROUNDS, setup.watcher)
    rows = summarise(samples, setup.tasks, (HF, PLAIN))
    find_differences(rows, samples, setup.tasks, HF, setup.model)
    found = [_clocked(None, None, rows[PLAIN], samples)]
    found += [_clocked(s, case, rows[str(i)], samples) for i, (s, case) in enumerate(chosen)]
    best = best_of(found)
    slow, compared = count_disturbed(samples)
    remarks = [f"{slow} of {compared} answers took over twice the time of their other round."]
    differing = sum(len(row.parted) for row in rows.values())
    if differing:
        remarks.append(f"{differing} answers differ from those of HF generate, see the JSON file.")
    return Findings(
        [as_row(c, found[0]) for c in found[1:]],
        [_table(found, rows[HF]), _sets(best, rows[PLAIN])],
        lambda figure: _draw(figure, found, best),
        (11.5, 4.6),
        more={
            HF: rows[HF].as_dict(PLAIN),
            PLAIN: as_row(found[0], found[0]),
            "disturbed": {"slow": slow, "compared": compared},
        },
        remarks=remarks,
    )


def clocked_cases(drafter: Any, budgets: Sequence[int]) -> list[Case]:
    """Trees of the engine's choice and of given sizes; where nodes look ahead, these with the root's rows alone too."""
    assert isinstance(drafter, InModelDrafter)
    sized = Case(BEST_FIRST, SIZED, None, drafter.max_nodes, drafter.settings.get("groups"))
    fixed = cases_of(drafter, (BEST_FIRST,), budgets, None)
    alone = [replace(case, groups=1) for case in fixed] if "groups" in drafter.settings else []
    return [sized, *alone, *fixed]


def best_of(found: Sequence[Clocked]) -> list[Clocked]:
    """Of every drafter the way that was fastest."""
    names = dict.fromkeys(c.name for c in found if c.subject is not None)
    return [max((c for c in found if c.name == name), key=lambda c: c.over_plain) for name in names]


def _made(drafter: Any, case: Case) -> InModelDrafter:
    made = with_tree(drafter, case)
    made.shape = None if case.label == SIZED else Fixed(case.nodes)
    return made


def _clocked(subject: Subject | None, case: Case | None, row: Row, samples: Sequence[Sample]) -> Clocked:
    counted = [s.answer for s in samples if s.method == row.method and isinstance(s.answer, Counted)]
    passes = max(sum(a.passes for a in counted), 1)
    rows, seconds = sum(a.rows for a in counted), sum(a.pass_seconds for a in counted)
    return Clocked(subject, case, row, rows / passes, seconds / passes)


def as_row(c: Clocked, plain: Clocked) -> dict[str, Any]:
    """Plain values of one way of decoding."""
    case = c.case
    return {
        "drafter": c.name,
        "tree": None if case is None else case.label,
        "nodes": None if case is None else case.nodes,
        "groups": None if case is None else case.groups,
        "rows_a_step": c.rows,
        "seconds_a_step": c.seconds,
        "step_over_plain": c.seconds / plain.seconds,
    } | c.row.as_dict(PLAIN)


def _guesses(c: Clocked) -> str:
    if c.case is None:
        return ""
    return BY_COST if c.case.label == SIZED else str(c.case.nodes)


def _looking(c: Clocked) -> str:
    if c.subject is None or c.case is None or "groups" not in c.subject.trained.settings:
        return ""
    if c.case.groups is None:
        return BY_COST if c.case.label == SIZED else "all"
    return ROOT if c.case.groups == 1 else str(c.case.groups)


def _table(found: Sequence[Clocked], hf: Row) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Tokens a second, and what they are made of",
        title_justify="left",
        title_style="bold",
        caption=f"HF generate: {hf.speed.value:.0f} tokens/s. Ahead: nodes with rows of the drafter's own; rows that "
        "join half-way count as half. Plain steps: a step's time in them. "
        "\\[95 % bootstrap, both sides by the same prompts]",
        caption_justify="left",
    )
    for column in ("drafter", "guesses", "ahead"):
        table.add_column(column)
    for column in ("rows", "step, ms", "plain steps", "tokens a step", "tokens/s", "over plain", "over HF"):
        table.add_column(column, justify="right")
    plain = found[0]
    for before, c in zip([None, *found], found, strict=False):
        if before is not None and before.name != c.name:
            table.add_section()
        table.add_row(
            "" if before is not None and before.name == c.name else c.name,
            _guesses(c),
            _looking(c),
            f"{c.rows:.1f}",
            f"{1e3 * c.seconds:.2f}",
            f"{c.seconds / plain.seconds:.2f}",
            f"{c.length:.2f}",
            f"{c.row.speed.value:.0f}",
            shown(c.row.over[PLAIN], "{:.2f}"),
            f"{c.row.over[HF].value:.2f}",
        )
    return table


def _sets(best: Sequence[Clocked], plain: Row) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Every drafter's fastest way, set by set: over plain, over HF generate",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("set")
    for c in best:
        assert c.case is not None
        ahead = _looking(c) if c.case.label != SIZED else ""
        label = f"{c.name}: {_guesses(c)}" + (f", {ahead}" if ahead else "")
        table.add_column(label, justify="right")
    for name in plain.by_set:
        ratios = [c.row.by_set[name].over for c in best]
        table.add_row(name, *(f"{over[PLAIN].value:.2f}, {over[HF].value:.2f}" for over in ratios))
    return table


def _draw(figure: Any, found: Sequence[Clocked], best: Sequence[Clocked]) -> None:
    steps, sets = figure.subplots(1, 2)
    plain = found[0]
    ends = [1.0]
    for i, name in enumerate(c.name for c in best):
        for c in (c for c in found if c.name == name):
            cost, length = c.seconds / plain.seconds, c.length
            ends += [cost, length]
            steps.plot([cost], [length], MARKERS.get(_looking(c), "o"), color=f"C{i}", markersize=6)
        steps.plot([], [], "o", color=f"C{i}", label=name)
    reach = [1.0, 1.05 * max(ends)]
    steps.plot(reach, reach, color="0.5", linewidth=1, linestyle=":")
    plain_axis(steps, "A step", "time, in plain steps (faster than plain above the dots)", "tokens a step")
    steps.legend(frameon=False, fontsize=8, title="^ the root alone looks ahead, * sized by cost", title_fontsize=7)
    names = list(plain.row.by_set)
    for i, c in enumerate(best):
        over = [c.row.by_set[name].over[PLAIN] for name in names]
        at = [n + 0.2 * (i - (len(best) - 1) / 2) for n in range(len(names))]
        lows, highs = zip(*map(bounds, over), strict=True)
        sets.hlines(at, lows, highs, color=f"C{i}", linewidth=1, alpha=0.4)
        sets.plot([e.value for e in over], at, "o", color=f"C{i}", markersize=4)
    sets.axvline(1, color="0.5", linewidth=1, linestyle=":")
    sets.set_yticks(range(len(names)), names)
    plain_axis(sets, "Every drafter's fastest way", "speed over plain decoding", "")
