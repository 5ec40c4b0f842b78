"""Early pruners with random heads, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftree.pruning import EarlyHead, EarlyPruning

# Between them every layer and kind of head; tiny models' early states say little, so much leaves.
PRUNERS: dict[str, Callable[[Any], EarlyPruning]] = {
    "early": lambda m: pruner(m, 1, top_k=30),
    "middle": lambda m: pruner(m, 2, top_k=40),
    "late": lambda m: pruner(m, 3, rank=8, top_k=70),
}


def pruner(model: Any, layer: int, rank: int = 0, **options: Any) -> EarlyPruning:
    head = randomised_head(EarlyHead.fresh(model, layer=layer, rank=rank))
    return EarlyPruning(head, always=True, **options)


def randomised_head(head: EarlyHead) -> EarlyHead:
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in head.weights.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return head
