"""Draft accuracy: how often the truth is among a drafter's best k guesses, by depth (Hidden Transfer, Figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from draftree.bench.analysis_guesses import Hits, hits_of
from draftree.bench.analysis_setup import RANKS, Findings, Sampled, Setup, Subject, bounds, plain_axis
from draftree.bench.summary import Estimate, shown

SHOWN_RANKS = (1, 2, 3, 5, 10)


def draft_accuracy(setup: Setup) -> Findings:
    """Top-1 to top-10 accuracy of every subject at every depth, with intervals over prompts."""
    found = measure_hits(setup)
    scores = {
        (subject.name, place): accuracies(hits, d)
        for subject, hits in found
        for d, place in enumerate(hits.places)
        if hits.cases[:, d].any()
    }
    cases = {(s.name, p): int(hits.cases[:, d].sum()) for s, hits in found for d, p in enumerate(hits.places)}
    by_set = {(s.name, p): _by_set(setup, hits, d) for s, hits in found for d, p in enumerate(hits.places)}
    methods = {subject.name: subject.method for subject, _ in found}
    rows = [
        {"drafter": name, "method": methods[name], "place": place, "top": k, "cases": cases[name, place]}
        | {"accuracy": score.as_dict(), "by_set": by_set[name, place][k - 1]}
        for (name, place), by_rank in scores.items()
        for k, score in enumerate(by_rank, 1)
    ]
    places = sorted({place for _, place in scores})
    remarks = ["N = 1 is what the model itself says next, which an early head guesses too."] if 1 in places else []
    return Findings(
        rows,
        [_table(scores, cases)],
        lambda figure: _draw(figure, scores, places, list(methods)),
        (2.8 * len(places) + 1.2, 3.9),
        remarks=remarks,
    )


def measure_hits(setup: Setup) -> list[tuple[Subject, Hits]]:
    """What every subject guesses along the answers to the measured prompts."""
    found = []
    for subject in setup.subjects:
        setup.watcher.stage(f"guesses of {subject.name}", len(setup.tasks))
        found.append((subject, hits_of(setup, subject.trained, [task.ids for task in setup.tasks])))
    return found


def accuracies(hits: Hits, d: int) -> list[Estimate]:
    """Top-1, top-2, .. top-10 accuracy at depth number `d` (from 0)."""
    within = hits.right[:, d].cumsum(-1)
    return [Sampled.share(within[:, k], hits.cases[:, d]).estimate for k in range(RANKS)]


def _by_set(setup: Setup, hits: Hits, d: int) -> list[dict[str, float]]:
    """Top-1, top-2, .. accuracy in every set of prompts that has a case at depth number `d`."""
    sets = np.array([task.prompt.set for task in setup.tasks])
    within, cases = hits.right[:, d].cumsum(-1), hits.cases[:, d]
    sums = {name: (within[sets == name].sum(0), cases[sets == name].sum()) for name in dict.fromkeys(sets.tolist())}
    return [{name: float(right[k] / seen) for name, (right, seen) in sums.items() if seen} for k in range(RANKS)]


def _table(scores: dict[tuple[str, int], list[Estimate]], cases: dict[tuple[str, int], int]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Draft accuracy, % of cases with the truth among the best k guesses",
        title_justify="left",
        title_style="bold",
        caption="N: places behind the newest token; 2 is a drafter's first guess. \\[95 % bootstrap over prompts]",
        caption_justify="left",
    )
    table.add_column("drafter")
    for heading in ("N", "cases", *(f"top-{k}" for k in SHOWN_RANKS)):
        table.add_column(heading, justify="right")
    before = None
    for (name, place), by_rank in scores.items():
        if before not in (None, name):
            table.add_section()
        further = [f"{100 * by_rank[k - 1].value:.1f}" for k in SHOWN_RANKS[1:]]
        first = shown(by_rank[0], "{:.1f}", 100)
        table.add_row("" if name == before else name, str(place), str(cases[name, place]), first, *further)
        before = name
    return table


def _draw(
    figure: Any, scores: dict[tuple[str, int], list[Estimate]], places: Sequence[int], names: Sequence[str]
) -> None:
    panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
    ranks = range(1, RANKS + 1)
    for axis, place in zip(panels, places, strict=True):
        for n, name in enumerate(names):
            by_rank = scores.get((name, place))
            if by_rank is None:
                continue
            axis.plot(ranks, [100 * e.value for e in by_rank], color=f"C{n}", marker=".", label=name)
            lows, highs = ([100 * bound for bound in side] for side in zip(*map(bounds, by_rank), strict=True))
            axis.fill_between(ranks, lows, highs, color=f"C{n}", alpha=0.15, linewidth=0)
        plain_axis(axis, f"N = {place}", "best k guesses", "truth among them, %" if place == places[0] else "")
        axis.set_xticks(ranks)
        axis.set_ylim(0, 100)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
