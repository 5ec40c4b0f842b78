"""What the experiments on tree sizes share: options, drafters, early heads, ways of decoding."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Setup
from draftree.drafting import Drafter
from draftree.pruning import EarlyHead

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DRAFTERS = ("lookahead", "hidden-transfer", "medusa")
OPTIONS: dict[str, Any] = {"per_set": 4, "max_new_tokens": 96, "sets": (), "drafters": DRAFTERS, "warm_per_set": 8}


def fresh(setup: Setup, name: str) -> Drafter:
    """The drafter that tables call `name`, as it is before the first prompt."""
    return setup.drafter(setup.named[name])


def heads(setup: Setup) -> list[EarlyHead]:
    """The early heads that the option `early_heads` names, by layer; for this model."""
    return [setup.trained(name) for name in setup["early_heads"]]


def batches(setup: Setup) -> list[int]:
    """Sizes of batches that the prompts fill."""
    return [size for size in setup["batch"] if size <= len(setup.tasks)]
