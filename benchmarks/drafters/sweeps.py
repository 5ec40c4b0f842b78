"""Sweeps over how drafters were trained: one row for each drafter given and depth, ordered by the setting that is
swept.

The papers' sweeps need a training run for each point: train as many drafters as the sweep has points, then give all of
them by `--drafter`. Accuracy against the transfer layer (Hidden Transfer, Figures 5 and 6), prompt tokens (BiTA, Table
3 and Figure 8), mask tokens (Figure 9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from benchmarks.drafters.acceptance import measured
from benchmarks.drafters.subjects import OPTIONS, subjects
from benchmarks.harness import Experiment, Setup, lines, table_of
from benchmarks.harness.truth import measured_hits
from draftree.drafting.in_model import BEST_FIRST

COLUMNS = ("drafter", "swept", "prompting", "place", "top_1", "top_5")


def sweep(setting: str, method: str, says: str) -> Callable[[Setup], Iterator[pd.DataFrame]]:
    """What runs over drafters of `method`, ordered by a setting of theirs."""

    def run(setup: Setup) -> Iterator[pd.DataFrame]:
        found = subjects(setup, method)
        *_, (lengths, _) = measured(setup, found, (BEST_FIRST,))
        keep = ["drafter", "nodes", "acceptance_length", "acceptance_length_low", "acceptance_length_high"]
        tables = {"Acceptance length, best-first trees": lengths[keep]}
        rows: list[dict[str, Any]] = []
        for name, hits in measured_hits(setup, found):
            settings = found[name].settings
            for d, place in enumerate(hits.places):
                held = settings[setting]
                facts = {"drafter": name, "swept": held[d] if isinstance(held, list | tuple) else held}
                if settings.get("prompts"):
                    facts["prompting"] = settings["prompting"]
                tops = {k: v for n in (1, 5) for k, v in hits.top(d, n).columns(f"top_{n}").items()}
                rows.append(facts | {"place": place} | tops)
            rows.sort(key=lambda row: (row["place"], row["swept"]))
            yield table_of(rows, differing=lengths.attrs["differing"], tables=tables)

    run.__doc__ = says
    return run


def _experiment(name: str, source: str, setting: str, method: str, says: str) -> Experiment:
    options = OPTIONS | {"drafters": (method,), "nodes": (4, 8, 16, 32), "warm_per_set": 4}
    plot = lines("swept", "top_1", "top_5", by="place")
    return Experiment(name, source, sweep(setting, method, says), COLUMNS, plot, options)


TRANSFER_LAYER = _experiment(
    "transfer-layer",
    "Hidden Transfer, Figures 5 and 6",
    "transfer_layers",
    "hidden-transfer",
    "Accuracy and tokens a step by the layer of the transfer, over drafters trained for several.",
)
PROMPT_TOKENS = _experiment(
    "prompt-tokens",
    "BiTA, Table 3 and Figure 8",
    "prompts",
    "bita",
    "Masks only, shallow and deep prompts, over drafters trained with several numbers of them.",
)
MASK_TOKENS = _experiment(
    "mask-tokens", "BiTA, Figure 9", "masks", "bita", "How many masks, over drafters trained with several of them."
)
EXPERIMENTS = (TRANSFER_LAYER, PROMPT_TOKENS, MASK_TOKENS)
