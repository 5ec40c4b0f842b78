"""`draftree bench propd pruning`: layer by top-k, what leaves, what it costs in acceptance, and what it brings in time.

ProPD's Table 2. Every drafter's trees have a fixed number of guesses; the same trees are verified whole and pruned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from draftree.bench.analysis_setup import Findings, Sampled, plain_axis
from draftree.bench.propd_runs import Run, Way, batches, differing, run_all
from draftree.bench.propd_setup import PLAIN, ProPDSetup
from draftree.bench.summary import shown
from draftree.pruning import EarlyPruning
from draftree.shaping import Fixed


def pruning(setup: ProPDSetup) -> Findings:
    """Tables and a picture of every early head, top-k and drafter."""
    nodes, steps = setup.settings.nodes, setup.settings.top_k
    table = Table(
        "drafter",
        "layer",
        "top-k",
        "pruned",
        "acceptance length",
        "against whole trees",
        "seconds a token, whole = 1",
        title=f"Trees of {nodes} guesses, pruned inside the pass",
        title_justify="left",
    )
    rows: list[dict[str, Any]] = []
    total = batches(setup.tasks, 1, (1 + len(setup.heads) * len(steps)) * len(setup.drafters) + 1)
    setup.watcher.stage("decoding", total)
    plain = run_all(setup.model, [Way(PLAIN)], setup.tasks, 1, setup.settings.max_new_tokens, setup.watcher)
    wrong = 0
    for name in setup.drafters:
        ways = [Way("whole", setup.make(name), Fixed(nodes))]
        for head in setup.heads:
            for k in steps:
                pruner = EarlyPruning(head, top_k=k, always=True)
                ways.append(Way(f"{head.layer}/{k}", setup.make(name), Fixed(nodes), pruner))
        runs = run_all(setup.model, ways, setup.tasks, 1, setup.settings.max_new_tokens, setup.watcher)
        wrong += differing(plain | runs, PLAIN)
        whole = runs.pop("whole")
        table.add_row(name, "", "whole", "", shown(whole.length.estimate, "{:.2f}"), "", "")
        rows.append({"drafter": name, "layer": None, "top_k": None} | _row(whole, whole))
        for key, run in runs.items():
            layer, most = key.split("/")
            row = {"drafter": name, "layer": int(layer), "top_k": int(most)} | _row(run, whole)
            rows.append(row)
            table.add_row(
                name,
                layer,
                most,
                f"{row['pruned']:.0%}",
                shown(run.length.estimate, "{:.2f}"),
                shown((run.length / whole.length).estimate, "{:.3f}"),
                shown((run.per_token / whole.per_token).estimate, "{:.2f}"),
            )
        table.add_section()

    def draw(figure: Any) -> None:
        for place, name in enumerate(setup.drafters):
            axis = figure.add_subplot(1, len(setup.drafters), place + 1)
            for head in setup.heads:
                own = [r for r in rows if r["drafter"] == name and r["layer"] == head.layer]
                axis.plot(
                    [r["pruned"] for r in own], [r["length_ratio"] for r in own], "o-", label=f"layer {head.layer}"
                )
                for r in own:
                    axis.annotate(
                        r["top_k"],
                        (r["pruned"], r["length_ratio"]),
                        fontsize=7,
                        xytext=(3, 3),
                        textcoords="offset points",
                    )
            axis.axhline(0.98, color="0.6", linewidth=0.8, linestyle="--")
            plain_axis(axis, name, "share of guesses pruned", "acceptance length, whole = 1")
            axis.legend(fontsize=8, frameon=False)

    remark = f"Answers that differ from the plain engine's: {wrong}. Numbers in the picture are top-k."
    return Findings(rows, [table], draw, (4.2 * len(setup.drafters), 4.2), {"differing": wrong}, [remark])


def _row(run: Run, whole: Run) -> dict[str, Any]:
    return {
        "pruned": run.pruned_share.value if sum(run.drafted) else 0.0,
        "acceptance_length": _plain(run.length),
        "length_ratio": (run.length / whole.length).value,
        "length_ratio_interval": _plain(run.length / whole.length),
        "time_per_token_ratio": _plain(run.per_token / whole.per_token),
    }


def _plain(sampled: Sampled) -> list[float | None]:
    """Value, low, high."""
    estimate = sampled.estimate
    return [float(np.float64(v)) if v is not None else None for v in (estimate.value, estimate.low, estimate.high)]
