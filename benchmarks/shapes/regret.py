"""How far a dynamic size stays behind the best static one where text, batch and context change midway.

One engine for each way goes through phases of other texts, batch sizes and context lengths, and keeps what it has
learned. The best static size is chosen with hindsight, for every phase by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Task, Way, measure, points, table_of
from benchmarks.harness.measure import of, per_token, size
from benchmarks.shapes.subjects import OPTIONS, SIZES, fresh
from draftree.engine import Engine
from draftree.shaping import DynamicTree, Fixed

DYNAMIC = "dynamic"
Phase = tuple[str, int, list[Task]]  # name, prompts together, prompts


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Time a token over that of the best static size, phase by phase, after a phase's first steps."""
    phases = _phases(setup)
    slots = max(batch for _, batch, _ in phases)
    rows: list[dict[str, Any]] = []
    for name in setup.named:
        ways = [Way(PLAIN), *(Way(f"n={n}", fresh(setup, name), Fixed(n)) for n in setup["sizes"])]
        ways.append(Way(DYNAMIC, fresh(setup, name), DynamicTree()))
        for way in ways:
            way.engine = Engine(setup.model, slots=slots, drafter=way.drafter, shape=way.shape)
        for phase, batch, tasks in phases:
            runs = measure(setup, ways, tasks, batch=batch, stop=False)
            runs = runs[runs["group"] >= _settled(runs, setup["settled"])]
            statics = [way.name for way in ways if way.name == PLAIN or way.name.startswith("n=")]
            best = min(statics, key=lambda way: per_token(of(runs, way)).value)
            own = of(runs, DYNAMIC)
            facts = {"drafter": name, "phase": phase, "batch": batch, "best_static": best, "way": DYNAMIC}
            ratio = per_token(own) / per_token(of(runs, best))
            rows.append(facts | ratio.columns("time_over_best_static") | {"draft_tokens_a_step": size(own)})
            yield table_of(rows)


def _settled(runs: pd.DataFrame, steps: int) -> int:
    """Return the first batch that counts: after so many steps of the dynamic way, or the last one."""
    taken = runs[runs["way"] == DYNAMIC].set_index("group")["passes"].cumsum().shift(fill_value=0)
    late = taken[taken >= steps]
    return int(late.index[0] if len(late) else taken.index[-1])


def _phases(setup: Setup) -> list[Phase]:
    """Half of the sets, the others, all in batches, and the longest prompts alone."""
    tasks = setup.tasks
    first = set(setup.sets[: len(setup.sets) // 2])
    one = [task for task in tasks if task.prompt.set in first]
    other = [task for task in tasks if task.prompt.set not in first]
    batch = min(4, max(1, len(tasks) // 2))
    longest = sorted(tasks, key=lambda task: -len(task.ids))[: max(len(tasks) // 4, 1)]
    phases = [(", ".join(sorted(first)), 1, one), ("other sets", 1, other)]
    phases += [(f"all, batch {batch}", batch, tasks), ("longest prompts", 1, longest)]
    return [phase for phase in phases if phase[2]]


EXPERIMENT = Experiment(
    run,
    ("drafter", "phase", "best_static", "way", "time_over_best_static", "draft_tokens_a_step"),
    points("time_over_best_static", label=("drafter", "phase", "way")),
    OPTIONS | {"sizes": SIZES, "settled": 50},
    name="regret",
    source="ProPD, Figure 3",
)
