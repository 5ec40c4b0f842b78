"""Sweeps over how drafters were trained: one row for each drafter given, ordered by the setting that is swept.

The papers' sweeps need a training run for each point. Train as many drafters as the sweep has points, then give all of
them to one of these experiments: accuracy against the transfer layer (Hidden Transfer, Figures 5 and 6), prompt tokens
(BiTA, Table 3 and Figure 8), mask tokens (Figure 9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.table import Table

from draftree.bench.analysis_acceptance import Measured, measure_trees
from draftree.bench.analysis_accuracy import accuracies, measure_hits
from draftree.bench.analysis_compare import as_row
from draftree.bench.analysis_setup import Findings, Setup, Subject, plain_axis
from draftree.bench.summary import Estimate, shown
from draftree.drafting.in_model import BEST_FIRST

SHOWN_TOP = (1, 5)
Swept = Callable[[Subject, int], int]  # the setting's value for the guess of a depth (from 0)


def _transfer_layer(subject: Subject, d: int) -> int:
    return int(subject.trained.settings["transfer_layers"][d])


def _prompts(subject: Subject, d: int) -> int:
    return int(subject.trained.settings["prompts"])


def _masks(subject: Subject, d: int) -> int:
    return int(subject.trained.settings["masks"])


def _sweep(swept: Swept, axis: str, setup: Setup) -> Findings:
    found = measure_hits(setup)
    lengths, plain = measure_trees(setup, (BEST_FIRST,))
    by_subject = {s.name: [m for m in lengths if m.subject is s] for s in setup.subjects}
    scores = {s.name: [accuracies(hits, d) for d in range(len(hits.places))] for s, hits in found}
    ordered = sorted((s for s, _ in found), key=lambda s: [swept(s, d) for d in range(len(scores[s.name]))])
    rows = []
    for subject in ordered:
        rows.append(
            {
                "drafter": subject.name,
                "method": subject.method,
                "settings": subject.trained.settings,
                "swept": [swept(subject, d) for d in range(len(scores[subject.name]))],
                "accuracy": [[e.as_dict() for e in by_rank] for by_rank in scores[subject.name]],
                "acceptance": [as_row(m, plain) for m in by_subject[subject.name]],
            }
        )
    return Findings(
        rows,
        [_table(axis, swept, ordered, scores, by_subject)],
        lambda figure: _draw(figure, axis, swept, ordered, scores, by_subject),
        (10.5, 4.2),
    )


transfer_layer = partial(_sweep, _transfer_layer, "transfer layer")
prompt_tokens = partial(_sweep, _prompts, "prompt tokens")
mask_tokens = partial(_sweep, _masks, "mask tokens")


def _value(swept: Swept, subject: Subject, depths: int) -> str:
    values = [swept(subject, d) for d in range(depths)]
    shallow = subject.trained.settings.get("prompts") and not subject.trained.settings["deep"]
    return ", ".join(map(str, values if len(set(values)) > 1 else values[:1])) + (" shallow" if shallow else "")


def _table(
    axis: str,
    swept: Swept,
    ordered: Sequence[Subject],
    scores: dict[str, list[list[Estimate]]],
    lengths: dict[str, list[Measured]],
) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"By {axis}",
        title_justify="left",
        title_style="bold",
        caption=(
            "Accuracies in %, N places behind the newest token; tokens a step with best-first trees. "
            "\\[95 % bootstrap over prompts]"
        ),
        caption_justify="left",
    )
    table.add_column("drafter")
    table.add_column(axis, justify="right")
    table.add_column("N", justify="right")
    for k in SHOWN_TOP:
        table.add_column(f"top-{k}", justify="right")
    table.add_column("tokens a step", justify="right")
    for subject in ordered:
        held = scores[subject.name]
        told = [f"{m.case.nodes} nodes: {shown(m.length.estimate, '{:.2f}')}" for m in lengths[subject.name]]
        for d in range(max(len(held), len(told))):
            first = (subject.name, _value(swept, subject, len(held))) if d == 0 else ("", "")
            tops = [shown(held[d][k - 1], "{:.1f}", 100) for k in SHOWN_TOP] if d < len(held) else [""] * len(SHOWN_TOP)
            table.add_row(*first, str(d + 2) if d < len(held) else "", *tops, told[d] if d < len(told) else "")
        table.add_section()
    return table


def _draw(
    figure: Any,
    axis: str,
    swept: Swept,
    ordered: Sequence[Subject],
    scores: dict[str, list[list[Estimate]]],
    lengths: dict[str, list[Measured]],
) -> None:
    left, right = figure.subplots(1, 2)
    for d in range(max(map(len, scores.values()))):
        held = [(swept(s, d), scores[s.name][d]) for s in ordered if d < len(scores[s.name])]
        for k, style in zip(SHOWN_TOP, ("-", ":"), strict=True):
            values = [100 * by_rank[k - 1].value for _, by_rank in held]
            label = f"N = {d + 2}, top-{k}"
            left.plot([x for x, _ in held], values, style, marker="o", color=f"C{d}", label=label)
    plain_axis(left, "Draft accuracy", axis, "truth among the best k guesses, %")
    left.set_ylim(0, 100)
    budgets = sorted({m.case.nodes for held in lengths.values() for m in held})
    for b, budget in enumerate(budgets):
        points = [(swept(s, 0), m) for s in ordered for m in lengths[s.name] if m.case.nodes == budget]
        values = [m.length.value for _, m in points]
        right.plot([x for x, _ in points], values, marker="o", color=f"C{b}", label=f"{budget} nodes")
    plain_axis(right, "Acceptance length, best-first trees", axis, "tokens a step")
    for panel in (left, right):
        panel.set_xticks(sorted({int(x) for line in panel.get_lines() for x in line.get_xdata()}))
        panel.legend(frameon=False, fontsize=8)
