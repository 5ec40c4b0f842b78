"""Trees sized by cost against every static size and plain decoding, each with a fresh drafter, on whole answers.

The best static size is chosen with hindsight, on the very answers that it is measured on. What measuring the cost of
steps takes is added to the time of the sized trees; prompts' passes, which are the same for all, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, measure, points, table_of
from benchmarks.harness.measure import all_differing, length, of, per_token, size
from benchmarks.shapes.subjects import batches, fresh, static_ways
from draftree.engine import Engine
from draftree.runner.step_cost import measure_cost
from draftree.shaping import DynamicTree

SIZED = "sized by cost"
DRAFTERS = (
    *("lookahead-cold", "lookahead", "hidden-transfer", "medusa", "draft-model"),
    *("lookahead+hidden-transfer", "lookahead+draft-model"),
)


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a second of trees sized by cost over those of the best static size, and over plain decoding."""
    engine = Engine(setup.model, slots=1)
    began = time.perf_counter()
    measure_cost(engine.runner)
    cost = time.perf_counter() - began
    remarks = [f"Measuring the cost of steps took {cost:.2f} s."]
    rows: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    wrong = 0
    for batch in batches(setup):
        for name in setup.named:
            ways = [Way(PLAIN), *static_ways(setup, name), Way(SIZED, fresh(setup, name), DynamicTree())]
            runs = measure(setup, ways, batch=batch, stop=batch == 1)
            wrong += all_differing(runs)
            owns = {way.name: of(runs, way.name) for way in ways}
            times = {way: per_token(own) for way, own in owns.items()}
            later = [seconds + cost / times[SIZED].units for seconds in times[SIZED].over]  # spread over all prompts
            times[SIZED] = replace(times[SIZED], over=later)
            best = min((way.name for way in ways[1:-1]), key=lambda way: times[way].value)
            rows.append(
                {"batch": batch, "drafter": name, "tokens": int(owns[SIZED]["tokens"].sum()), "best_static": best}
                | (times[best] / times[SIZED]).columns("over_best_static")
                | (times[PLAIN] / times[SIZED]).columns("over_plain")
                | {"best_static_over_plain": (times[PLAIN] / times[best]).value}
                | {"acceptance_length": length(owns[SIZED]).value, "draft_tokens_a_step": size(owns[SIZED])}
            )
            speeds += [
                {"batch": batch, "drafter": name, "way": way, "tokens_a_second": 1 / times[way].value}
                | {"acceptance_length": length(own).value, "draft_tokens_a_step": size(own)}
                for way, own in owns.items()
            ]
            yield table_of(rows, differing=wrong, remarks=remarks, tables={"All sizes": pd.DataFrame(speeds)})


EXPERIMENT = Experiment(
    run,
    ("batch", "drafter", "tokens", "best_static", "over_best_static", "over_plain", "acceptance_length"),
    points("over_best_static", label=("batch", "drafter")),
    {
        **{"per_set": 3, "max_new_tokens": 96, "sets": (), "drafters": DRAFTERS, "warm_per_set": 8},
        **{"batch": (1, 4), "sizes": (2, 4, 8, 15)},
    },
    name="gate",
)
