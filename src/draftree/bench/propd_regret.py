"""`draftree bench propd regret`: how far a dynamic size stays behind the best static one when things change midway.

One engine for each way goes through phases of other texts, batch sizes and context lengths, and keeps what it has
learned. The best static size is chosen with hindsight, for every phase by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from draftree.bench.analysis_setup import Findings, Sampled, bounds, plain_axis
from draftree.bench.harness import Task
from draftree.bench.propd_runs import CAPACITY, Run, Way, answer
from draftree.bench.propd_setup import PLAIN, ProPDSetup
from draftree.bench.summary import shown
from draftree.engine import Engine, Rules
from draftree.shaping import DynamicTree, Fixed

SETTLED = 50  # steps of a phase after which regret counts
WAYS = {"dynamic": {}, "dynamic, line": {"cost": "line"}, "dynamic, by rank": {"acceptance": "by-rank"}}


class _Phase(NamedTuple):
    name: str
    batch: int
    tasks: Sequence[Task]


def regret(setup: ProPDSetup) -> Findings:
    """Time a token of dynamic sizes over that of the best static one, phase by phase."""
    phases = _phases(setup)
    table = Table(
        "drafter",
        "phase",
        "best static",
        *WAYS,
        title=f"Time a token against the best static size, behind the first {SETTLED} steps of a phase",
        title_justify="left",
    )
    rows: list[dict[str, Any]] = []
    traces: dict[str, list[float]] = {}
    for name in setup.drafters:
        ways = [Way(PLAIN)]
        ways += [Way(f"n={n}", setup.make(name), Fixed(n)) for n in setup.settings.sizes]
        ways += [Way(way, setup.make(name), DynamicTree(**options)) for way, options in WAYS.items()]  # type: ignore[arg-type]
        most = max(phase.batch for phase in phases)
        engines = {
            w.name: Engine(setup.model, slots=most, drafter=w.drafter, shape=w.shape, capacity=CAPACITY) for w in ways
        }
        trace: list[float] = []
        for phase in phases:
            runs, all_steps = _through(setup, phase, ways, engines, name)
            trace += all_steps
            best = min((w for w in runs if w == PLAIN or w.startswith("n=")), key=lambda w: runs[w].per_token.value)
            row: dict[str, Any] = {"drafter": name, "phase": phase.name, "batch": phase.batch, "best": best}
            cells = []
            for way in WAYS:
                ratio: Sampled = runs[way].per_token / runs[best].per_token
                row[way] = [ratio.value, *bounds(ratio.estimate)]
                cells.append(shown(ratio.estimate, "{:.3f}"))
            row["sizes"] = {way: run.size for way, run in runs.items()}
            rows.append(row)
            table.add_row(name, phase.name, best, *cells)
        traces[name] = trace
        table.add_section()

    def draw(figure: Any) -> None:
        for place, (name, trace) in enumerate(traces.items()):
            axis = figure.add_subplot(len(traces), 1, place + 1)
            axis.plot(trace, linewidth=0.7)
            plain_axis(axis, f"{name}: guesses a request that the dynamic tree chose", "step", "guesses")

    return Findings(rows, [table], draw, (9, 2.4 * len(traces)))


def _phases(setup: ProPDSetup) -> list[_Phase]:
    """Half of the sets, the others, all in batches, and the longest prompts alone."""
    tasks = setup.tasks
    sets = list(dict.fromkeys(task.prompt.set for task in tasks))
    first = set(sets[: len(sets) // 2])
    one = [task for task in tasks if task.prompt.set in first]
    other = [task for task in tasks if task.prompt.set not in first]
    batch = min(4, max(1, len(tasks) // 2))
    longest = sorted(tasks, key=lambda task: -len(task.ids))[: max(len(tasks) // 4, 1)]
    return [
        _Phase(", ".join(sorted(first)), 1, one),
        _Phase("other sets", 1, other),
        _Phase(f"all, batch {batch}", batch, tasks),
        _Phase("longest prompts", 1, longest),
    ]


def _through(
    setup: ProPDSetup, phase: _Phase, ways: Sequence[Way], engines: dict[str, Engine], name: str
) -> tuple[dict[str, Run], list[float]]:
    """Runs behind the phase's first steps, and the dynamic way's size at every step."""
    rules = Rules(setup.settings.max_new_tokens)
    groups = [phase.tasks[i : i + phase.batch] for i in range(0, len(phase.tasks) - phase.batch + 1, phase.batch)]
    setup.watcher.stage(f"{name}: {phase.name}", len(groups) * len(ways))
    runs = {way.name: Run() for way in ways}
    sizes: list[float] = []
    for number, group in enumerate(groups):
        first = number % len(ways)
        settled = len(sizes) >= SETTLED or number == len(groups) - 1  # of a short run at least the end counts
        for way in [*ways[first:], *ways[:first]]:
            run = runs[way.name] if settled else Run()
            before = len(run.sizes)
            answer(engines[way.name], way, run, group, rules)
            if way.name == "dynamic":
                sizes += run.sizes[before:]
            setup.watcher.step()
    return runs, sizes
