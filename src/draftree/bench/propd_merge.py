"""`draftree bench propd merge`: several drafters under one budget against each of them alone, at equal budgets."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from draftree.bench.analysis_setup import Findings, Sampled, bounds, plain_axis
from draftree.bench.propd_runs import Run, Way, batches, differing, run_all
from draftree.bench.propd_setup import PLAIN, ProPDSetup
from draftree.bench.summary import shown
from draftree.drafting import Merge
from draftree.shaping import Fixed

BUDGETS = (4, 8, 16)


def merged(setup: ProPDSetup) -> Findings:
    """Acceptance lengths of every pair of a trie and another drafter, in all and set by set.

    Raises:
        ValueError: fewer than two drafters.
    """
    names = list(setup.drafters)
    if len(names) < 2:
        raise ValueError("merge needs two drafters or more: add --drafter once for each.")
    table = Table(
        "drafters", "guesses", "alone", "merged", "over the best alone", "sets below by more than the interval",
        title="Acceptance length at equal node budgets", title_justify="left",
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    sets = list(dict.fromkeys(task.prompt.set for task in setup.tasks))
    member = {s: np.array([task.prompt.set == s for task in setup.tasks]) for s in sets}
    new = setup.settings.max_new_tokens
    pairs = [(names[0], name) for name in names[1:]]
    setup.watcher.stage("decoding", batches(setup.tasks, 1, 1 + len(BUDGETS) * (len(names) + len(pairs))))
    truth = run_all(setup.model, [Way(PLAIN)], setup.tasks, 1, new, setup.watcher)
    wrong = 0
    for budget in BUDGETS:
        ways = [Way(name, setup.make(name), Fixed(budget)) for name in names]
        for pair in pairs:
            ways.append(Way(" + ".join(pair), Merge([setup.make(name) for name in pair]), Fixed(budget)))
        runs = run_all(setup.model, ways, setup.tasks, 1, new, setup.watcher)
        wrong += differing(truth | runs, PLAIN)
        for pair in pairs:
            both = runs[" + ".join(pair)]
            best = max(pair, key=lambda name: runs[name].length.value)
            ratio = both.length / runs[best].length
            below = [s for s in sets if _clearly_below(both, [runs[name] for name in pair], member[s])]
            rows.append(
                {
                    "drafters": list(pair),
                    "nodes": budget,
                    "alone": {name: runs[name].length.value for name in pair},
                    "merged": [both.length.value, *bounds(both.length.estimate)],
                    "over_best": [ratio.value, *bounds(ratio.estimate)],
                    "sets_below": below,
                    "by_set": {
                        s: [_of(both, member[s]).value, *(_of(runs[name], member[s]).value for name in pair)]
                        for s in sets
                    },
                }
            )
            table.add_row(
                " + ".join(pair),
                str(budget),
                " / ".join(f"{runs[name].length.value:.2f}" for name in pair),
                shown(both.length.estimate, "{:.2f}"),
                shown(ratio.estimate, "{:.3f}"),
                ", ".join(below) or "none",
            )

    def draw(figure: Any) -> None:
        for place, row in enumerate(rows):
            axis = figure.add_subplot(len(rows), 1, place + 1)
            values = np.array(list(row["by_set"].values()))
            labels = ["merged", *row["drafters"]]
            for i, label in enumerate(labels):
                axis.bar(np.arange(len(sets)) + 0.27 * (i - 1), values[:, i], 0.25, label=label)
            axis.set_xticks(range(len(sets)), sets, rotation=20, ha="right")
            plain_axis(axis, f"{' + '.join(row['drafters'])}, {row['nodes']} guesses", "", "acceptance length")
            axis.legend(fontsize=7, frameon=False, ncols=3)

    return Findings(rows, [table], draw, (9, 2.6 * len(rows)), {"differing": wrong}, [f"Differing answers: {wrong}."])


def _of(run: Run, chosen: np.ndarray) -> Sampled:
    """Acceptance length over some of the prompts."""
    return Sampled.share(np.array(run.accepted)[chosen], np.array(run.steps)[chosen], plus=1.0)


def _clearly_below(both: Run, alone: list[Run], chosen: np.ndarray) -> bool:
    """Whether the merged trees are behind the better drafter of this set by more than chance."""
    best = max((_of(run, chosen) for run in alone), key=lambda length: length.value)
    high = (_of(both, chosen) / best).estimate.high
    return high is not None and high < 1.0
