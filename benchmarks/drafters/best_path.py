"""What a tree gives over its best path: all that an engine can verify which takes one path of draft tokens a request.

vLLM is one, and so are the speculative modes of most others. The same drafter with the same most draft tokens of a
step, once with a tree and once with a single branch, and beside them a tree sized by cost.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.harness import Experiment, Setup, bars
from benchmarks.harness.setup import TRIE
from benchmarks.harness.trees import CHAIN, Case, anew, with_tree
from benchmarks.papers.ways import COLUMNS, compared, sized
from benchmarks.shapes.subjects import fresh
from draftree.drafting import Drafter, DraftModel, Lookahead
from draftree.drafting.in_model import InModelDrafter
from draftree.tree.static import chain


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Best path, tree of as many draft tokens, and tree sized by cost, over plain decoding, for each drafter."""
    ways = []
    for name in setup.named:
        ways += [
            sized(f"{name}, best path", _path(setup, name), setup["nodes"]),
            sized(f"{name}, tree", _tree(setup, name), setup["nodes"]),
            sized(f"{name}, tree by cost", _tree(setup, name), None),
        ]
    yield from compared(setup, ways)


def _tree(setup: Setup, name: str) -> Drafter:
    drafter = fresh(setup, name)
    return anew(drafter) if isinstance(drafter, InModelDrafter) else drafter


def _path(setup: Setup, name: str) -> Drafter:
    """Return the same drafter, whose trees are one branch; raise a ValueError for one that has no such form."""
    drafter = fresh(setup, name)
    if isinstance(drafter, InModelDrafter):
        depth = drafter.depth
        return with_tree(drafter, Case(CHAIN, tuple(chain(depth)), depth))
    if isinstance(drafter, DraftModel):
        return DraftModel(drafter.model, depth=drafter.depth, branching=1)
    if isinstance(drafter, Lookahead):
        return setup.trie(setup.texts if setup.named[name] == TRIE else [], mode="single")
    raise ValueError(f"{name!r} has no form that drafts one branch: leave it out.")


EXPERIMENT = Experiment(
    run,
    tuple(column for column in COLUMNS if column not in ("batch", "over_hf", "over_the_whole", "draft_ms", "paper")),
    bars("over_plain", "acceptance_length", label="way"),
    {
        **{"per_set": 3, "max_new_tokens": 64, "sets": (), "batch": 1, "warm_per_set": 8, "nodes": 8},
        "drafters": ("lookahead", "draft-model", "hidden-transfer", "medusa"),
    },
    name="best-path",
)
