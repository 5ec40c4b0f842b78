"""Ways of decoding with outside drafters side by side on the same prompts: what Lookahead's and BiTA's tables compare.

The trie has seen the model's answers to other prompts of the same sets, as the paper warms it with a development set,
and goes on learning. Speeds are over plain decoding by the same engine in the same run, prompts' passes left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Setup, Way, table_of
from benchmarks.harness.measure import all_differing, length, measure_parts, of, per_token, size
from draftree.drafting import Drafter
from draftree.shaping import DynamicTree, Fixed

COLUMNS = (
    *("way", "batch", "over_plain", "over_the_whole", "acceptance_length", "draft_tokens_a_step", "draft_ms"),
    "paper",
)
QUICK: dict[str, Any] = {"per_set": 1, "max_new_tokens": 64, "sets": (), "nodes": 16, "warm_per_set": 8}


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of decoding in a table.

    Attributes:
        name: what the table calls it.
        make: its drafter, as it is before the first prompt.
        nodes: draft tokens of every step; None for trees sized by cost.
        paper: the paper's figure for it.
        reject: whether no draft token is accepted.
    """

    name: str
    make: Callable[[], Drafter]
    nodes: int | None
    paper: str = ""
    reject: bool = False

    def way(self) -> Way:
        """As `measure` takes it."""
        shape = DynamicTree() if self.nodes is None else Fixed(self.nodes)
        return Way(self.name, self.make(), shape, {"reject_drafts": self.reject})


def compared(
    setup: Setup, cells: Sequence[Cell], *, batch: int = 1, over: str = "", **attrs: Any
) -> Iterator[pd.DataFrame]:
    """Compare the cells with plain decoding, `batch` prompts together; a row for each, also over the way `over`."""
    ways = [Way(PLAIN), *(cell.way() for cell in cells)]
    printed = {cell.name: cell.paper for cell in cells}
    for runs in measure_parts(setup, ways, batch=batch):
        plain, rows = of(runs, PLAIN), []
        for way in ways:
            own = of(runs, way.name)
            row = {"way": way.name, "batch": batch} | (per_token(plain) / per_token(own)).columns("over_plain")
            row |= (per_token(of(runs, over)) / per_token(own)).columns("over_the_whole") if over else {}
            row |= length(own).columns("acceptance_length") | {"draft_tokens_a_step": size(own)}
            row |= {"draft_ms": 1000 * own["draft"].sum() * batch / max(own["steps"].sum(), 1)}
            rows.append(row | {"tokens_a_second": 1 / per_token(own).value, "paper": printed.get(way.name) or None})
        yield table_of(rows, differing=all_differing(runs), **attrs)
