"""`draftree bench propd batch` and `worst-case`: dynamic trees and pruning by batch, and where nothing can be won.

ProPD's Tables 1 and 3. Static trees of every size stand for what an exhaustive search on this machine would choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from draftree.bench.analysis_setup import Findings, Sampled, bounds, plain_axis
from draftree.bench.propd_runs import Run, Way, batches, differing, run_all
from draftree.bench.propd_setup import PLAIN, ProPDSetup
from draftree.bench.summary import shown
from draftree.pruning import EarlyPruning
from draftree.shaping import DynamicTree, Fixed

ABLATION = ("static", "static, pruned", "dynamic", "dynamic, pruned")
ROOT_ALONE = ", root's rows"


def batch_sizes(setup: ProPDSetup) -> Findings:
    """Speed of every way over plain decoding in the same batch, for every drafter and batch size."""
    settings = setup.settings
    table = Table(
        "drafter",
        "batch",
        "best static",
        *ABLATION,
        "dynamic / best static",
        title=f"Tokens a second, plain decoding of the same batch = 1 (static: {settings.nodes} guesses)",
        title_justify="left",
    )
    rows: list[dict[str, Any]] = []
    wrong = 0
    possible = [size for size in settings.batch if size <= len(setup.tasks)]
    for name in setup.drafters:
        for size in possible:
            ways = _ways(setup, name)
            setup.watcher.stage(f"{name}, batch {size}", batches(setup.tasks, size, len(ways)))
            runs = run_all(setup.model, ways, setup.tasks, size, settings.max_new_tokens, setup.watcher, stop=False)
            wrong += differing(runs, PLAIN)
            speeds = {way: _speed(run, runs[PLAIN]) for way, run in runs.items()}
            best = max((way for way in runs if way.startswith("n=")), key=lambda way: speeds[way].value)
            against = _speed(runs["dynamic"], runs[best])
            for way, run in runs.items():
                to_the_last = (runs[PLAIN].per_token_to_the_last / run.per_token_to_the_last).value
                found = {"drafter": name, "batch": size, "way": way} | _row(run, speeds[way])
                rows.append(found | {"speed_to_the_last": to_the_last})
            table.add_row(
                name,
                str(size),
                f"{speeds[best].value:.2f} ({best})",
                *(shown(speeds[way].estimate, "{:.2f}") if way in speeds else "" for way in ABLATION),
                shown(against.estimate, "{:.2f}"),
            )
        table.add_section()

    def draw(figure: Any) -> None:
        for place, name in enumerate(setup.drafters):
            axis = figure.add_subplot(1, len(setup.drafters), place + 1)
            own = [r for r in rows if r["drafter"] == name]
            statics = [
                max(r["speed"][0] for r in own if r["batch"] == b and r["way"].startswith("n=")) for b in possible
            ]
            axis.plot(range(len(possible)), statics, "s--", color="0.5", label="best static")
            for way in ABLATION:
                line = [r for r in own if r["way"] == way]
                if line:
                    axis.plot(range(len(line)), [r["speed"][0] for r in line], "o-", label=way)
                    axis.fill_between(range(len(line)), *zip(*(r["speed"][1:] for r in line), strict=True), alpha=0.12)
            axis.axhline(1.0, color="0.6", linewidth=0.8)
            axis.set_xticks(range(len(possible)), [str(b) for b in possible])
            plain_axis(axis, name, "batch", "tokens a second, plain = 1")
            axis.legend(fontsize=8, frameon=False)

    remark = (
        f"Answers that differ from the plain engine's: {wrong}. Every answer has {settings.max_new_tokens} tokens; the "
        "clock runs while batches are full, until the first one is complete (speed_to_the_last in the file: until the "
        "last is); prompt passes are not in it."
    )
    return Findings(rows, [table], draw, (4.2 * len(setup.drafters), 4.2), {"differing": wrong}, [remark])


def _ways(setup: ProPDSetup, name: str) -> list[Way]:
    ways = [Way(PLAIN)]
    for nodes in setup.settings.sizes:
        ways.append(Way(f"n={nodes}", setup.make(name), Fixed(nodes)))
        drafter = setup.make(name)
        if drafter.rows(8, 1, 1) != drafter.rows(8, 1, 8):
            ways.append(Way(f"n={nodes}{ROOT_ALONE}", drafter, Fixed(nodes, spawn=1)))
    ways.append(Way("static", setup.make(name), Fixed(setup.settings.nodes)))
    ways.append(Way("dynamic", setup.make(name), DynamicTree()))
    if setup.heads:
        head = setup.heads[0]
        always = EarlyPruning(head, always=True)
        ways.insert(-1, Way("static, pruned", setup.make(name), Fixed(setup.settings.nodes), always))
        ways.append(Way("dynamic, pruned", setup.make(name), DynamicTree(), EarlyPruning(head)))
    return ways


def _speed(run: Run, plain: Run) -> Sampled:
    return plain.per_token / run.per_token


def _row(run: Run, speed: Sampled) -> dict[str, Any]:
    return {
        "speed": [speed.value, *bounds(speed.estimate)],
        "acceptance_length": [run.length.value, *bounds(run.length.estimate)],
        "guesses_a_step": run.size,
        "pruned": run.pruned_share.value if sum(run.drafted) else 0.0,
        "tokens_a_second": 1 / run.per_token.value,
    }


def worst_case(setup: ProPDSetup) -> Findings:
    """Drafters that know nothing of the text: what is left of the plain speed."""
    table = Table(
        "drafter", "batch", "of plain speed", "guesses a step", "acceptance length", title_justify="left",
        title="Drafters that know nothing of these texts, dynamic trees",
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    wrong = 0
    sizes: Sequence[int] = sorted({min(setup.settings.batch), max(setup.settings.batch)})
    for size in (s for s in sizes if s <= len(setup.tasks)):
        ways = [Way(PLAIN), *(Way(name, make(), DynamicTree()) for name, make in setup.foreign.items())]
        setup.watcher.stage(f"batch {size}", batches(setup.tasks, size, len(ways)))
        new = setup.settings.max_new_tokens
        runs = run_all(setup.model, ways, setup.tasks, size, new, setup.watcher, stop=False)
        wrong += differing(runs, PLAIN)
        for name in setup.foreign:
            speed = _speed(runs[name], runs[PLAIN])
            rows.append({"drafter": name, "batch": size} | _row(runs[name], speed))
            table.add_row(
                name, str(size), shown(speed.estimate, "{:.3f}"), f"{runs[name].size:.2f}",
                f"{runs[name].length.value:.2f}",
            )  # fmt: skip

    def draw(figure: Any) -> None:
        axis = figure.add_subplot()
        labels = [f"{r['drafter']}, batch {r['batch']}" for r in rows]
        for place, row in enumerate(rows):
            value, low, high = row["speed"]
            axis.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", color="C0")
        axis.axvline(0.97, color="0.6", linewidth=0.8, linestyle="--")
        axis.set_yticks(range(len(labels)), labels)
        axis.invert_yaxis()
        plain_axis(axis, "Worst case", "tokens a second, plain = 1", "")

    return Findings(
        rows, [table], draw, (7, 1.2 + 0.5 * len(rows)), {"differing": wrong}, [f"Differing answers: {wrong}."]
    )
