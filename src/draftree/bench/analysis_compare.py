"""Acceptance lengths side by side: the table and the picture of trees, and the ratios that the papers speak of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from draftree.bench.analysis_acceptance import Measured, measure_trees
from draftree.bench.analysis_setup import Findings, Sampled, Setup, Subject, bounds, plain_axis
from draftree.bench.analysis_trees import EFFICIENT, EFFICIENT_CODE, FULL, KINDS, STRAIGHTFORWARD
from draftree.bench.summary import shown

BESIDE = 0.2  # nodes, from one kind's interval to the next one's
MARKERS = dict(zip(KINDS, "xv^so*D", strict=True))


@dataclass(frozen=True, slots=True)
class Relation:
    """One ratio of acceptance lengths: `above` over `below`, both within `budget` guesses."""

    what: str
    budget: int
    above: Measured
    below: Measured

    @property
    def ratio(self) -> Sampled:
        """Resampled by the same prompts."""
        return self.above.length / self.below.length

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        sides = [{"drafter": m.subject.name, "tree": m.case.label} for m in (self.above, self.below)]
        return {"relation": self.what, "nodes": self.budget, "above": sides[0], "below": sides[1]} | {
            "ratio": self.ratio.estimate.as_dict()
        }


def acceptance(setup: Setup) -> Findings:
    """Tokens a step of every drafter with every tree, and how they compare at equal node budgets."""
    found, plain = measure_trees(setup)
    relations = relate(found, setup.settings.budgets)
    names = list(dict.fromkeys(m.subject.name for m in found))
    tables = [_table(found, plain)]
    if relations:
        tables.append(_relations(relations))
    differing = sum(m.differing for m in found)
    remarks = [f"{differing} answers differ from the plain engine's, see the JSON file."] if differing else []
    return Findings(
        [as_row(m, plain) for m in found],
        tables,
        lambda figure: _draw(figure, found, names),
        (4.4 * len(names) + 3, 5.0),
        more={"relations": [relation.as_dict() for relation in relations], "plain_seconds_a_step": plain},
        remarks=remarks,
    )


def as_row(m: Measured, plain: float) -> dict[str, Any]:
    """Plain values of one drafter with one tree; `plain` is seconds of a plain pass."""
    return {
        "drafter": m.subject.name,
        "method": m.subject.method,
        "kind": m.case.kind,
        "tree": m.case.label,
        "choices": m.case.choices,
        "nodes": m.case.nodes,
        "acceptance_length": m.length.estimate.as_dict(),
        "rows_a_step": m.rows,
        "seconds_a_step": m.seconds.estimate.as_dict(),
        "step_over_plain": m.seconds.value / plain,
        "differing_prompts": m.differing,
    }


def relate(found: Sequence[Measured], budgets: Sequence[int]) -> list[Relation]:
    """The ratios that the papers report, as far as there is something to compare.

    The best tree of a side is the one with the longest measured acceptance within the budget, on these prompts.
    """
    subjects = list({id(m.subject): m.subject for m in found}.values())
    relations = []

    def compare(what: str, budget: int, above: Measured | None, below: Measured | None) -> None:
        if above is not None and below is not None:
            relations.append(Relation(what, budget, above, below))

    def best(subject: Subject, budget: int, *kinds: str) -> Measured | None:
        fitting = [
            m for m in found if m.subject is subject and m.case.nodes <= budget and (not kinds or m.case.kind in kinds)
        ]
        return max(fitting, key=lambda m: m.length.value, default=None)

    for budget in sorted(set(budgets)):
        for subject in subjects:
            for baseline in subjects:
                if baseline.method == "medusa" != subject.method:
                    compare("over Medusa", budget, best(subject, budget), best(baseline, budget))
                if _only_masks(baseline) and not _only_masks(subject) and _masks(subject) == _masks(baseline):
                    prompts = "deep" if subject.trained.settings["deep"] else "shallow"
                    what = f"{prompts} prompts over masks only"
                    compare(what, budget, best(subject, budget), best(baseline, budget))
            efficient = best(subject, budget, EFFICIENT, EFFICIENT_CODE)
            compare("efficient over best full", budget, efficient, best(subject, budget, FULL))
            straight = best(subject, budget, STRAIGHTFORWARD)
            compare("efficient over straightforward", budget, efficient, straight)
    return relations


def _masks(subject: Subject) -> int | None:
    return subject.trained.settings["masks"] if subject.method == "bita" else None


def _only_masks(subject: Subject) -> bool:
    return subject.method == "bita" and subject.trained.settings["prompts"] == 0


def _table(found: Sequence[Measured], plain: float) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Acceptance length by tree",
        title_justify="left",
        title_style="bold",
        caption=(
            "1 + accepted / steps \\[95 % bootstrap over prompts]. Nodes: guesses a step; rows: those and what the "
            f"drafter attaches, prompts left out. A plain step takes {1000 * plain:.2f} ms."
        ),
        caption_justify="left",
    )
    for heading in ("drafter", "tree"):
        table.add_column(heading)
    for heading in ("nodes", "acceptance\nlength", "rows\na step", "ms\na step", "over a\nplain step"):
        table.add_column(heading, justify="right")
    before = None
    for m in found:
        if before not in (None, m.subject.name):
            table.add_section()
        table.add_row(
            "" if before == m.subject.name else m.subject.name,
            m.case.label,
            str(m.case.nodes),
            shown(m.length.estimate, "{:.3f}"),
            f"{m.rows:.1f}",
            shown(m.seconds.estimate, "{:.2f}", 1000),
            f"{m.seconds.value / plain:.2f}",
        )
        before = m.subject.name
    return table


def _relations(relations: Sequence[Relation]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Ratios of acceptance lengths within the same number of guesses",
        title_justify="left",
        title_style="bold",
        caption="Of each side the tree that was walked furthest. \\[95 % bootstrap, both sides by the same prompts]",
        caption_justify="left",
    )
    table.add_column("ratio")
    table.add_column("nodes", justify="right")
    table.add_column("above")
    table.add_column("below")
    table.add_column("times", justify="right")
    before = None
    for r in sorted(relations, key=lambda r: (r.what, r.above.subject.name, r.below.subject.name, r.budget)):
        above, below = (f"{m.subject.name}, {m.case.label}" for m in (r.above, r.below))
        if r.below.subject is r.above.subject:
            below = r.below.case.label
        if before not in (None, r.what):
            table.add_section()
        what = "" if before == r.what else r.what
        table.add_row(what, str(r.budget), above, below, shown(r.ratio.estimate, "{:.3f}"))
        before = r.what
    return table


def _draw(figure: Any, found: Sequence[Measured], names: Sequence[str]) -> None:
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True, sharex=True)[0]
    for axis, name in zip(panels, names, strict=True):
        for k, kind in enumerate(KINDS):
            held = sorted((m for m in found if (m.subject.name, m.case.kind) == (name, kind)), key=_nodes)
            if held:
                estimates = [m.length.estimate for m in held]
                lows, highs = zip(*map(bounds, estimates), strict=True)
                values = [e.value for e in estimates]
                reach = [
                    [v - low for v, low in zip(values, lows, strict=True)],
                    [high - v for v, high in zip(values, highs, strict=True)],
                ]
                at = [_nodes(m) + BESIDE * (k - len(KINDS) // 2) for m in held]  # so that intervals stand side by side
                axis.errorbar(at, values, reach, linestyle="none", color=f"C{k}", alpha=0.35, linewidth=1.2)
                line = axis.plot(at, values, marker=MARKERS[kind], color=f"C{k}", markersize=5, linewidth=1.2)[0]
                line.set_label(kind)
                if kind == FULL:  # of several depths, so no line leads through them
                    line.set_linestyle("none")
        plain_axis(axis, name, "guesses a step", "tokens a step" if axis is panels[0] else "")
    handles = {label: h for axis in panels for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, loc="outside right center")


def _nodes(m: Measured) -> int:
    return m.case.nodes
