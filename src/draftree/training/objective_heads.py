"""Objectives of heads that read states of the plain pass: Medusa's and early heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftree.drafting.folder import Trained
from draftree.training.objective import DrafterObjective, cross_entropy
from draftree.training.rows import Batch


class MedusaObjective(DrafterObjective):
    """Cross entropy of head i against the token 2 + i places after the split point, summed with weights decay^i.

    Args:
        trained, model: see `DrafterObjective`.
        decay: weight of each head relative to the one before (the authors' code: 0.8); 1 weighs all alike.
    """

    def __init__(self, trained: Trained, model: Any, *, decay: float = 1.0) -> None:
        super().__init__(trained, model)
        if not 0 < decay <= 1:
            raise ValueError(f"decay is {decay}: give a number over 0 and at most 1.")
        self.decay = decay
        self.places = tuple(range(2, int(trained.settings["heads"]) + 2))

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        states = self.layout.close(self.tap(batch, len(self.target.layers)))
        logits = list(self.weights(states, self.layout.head))
        losses = _losses(self, batch, logits)
        return sum((self.decay**i * loss for i, loss in enumerate(losses)), losses[0] * 0), logits


class EarlyHeadObjective(DrafterObjective):
    """Cross entropy of prediction i with the token i places after the split point, summed; the first is the next one.

    See `DrafterObjective`; `trained` is an `EarlyHead`.
    """

    def __init__(self, trained: Trained, model: Any) -> None:
        super().__init__(trained, model)
        self.layer = int(trained.settings["layer"])
        self.places = tuple(range(1, int(trained.settings["places"]) + 1))

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        logits = self.weights.ahead(self.tap(batch, self.layer), self.layout.head)
        return torch.stack(_losses(self, batch, logits)).sum(), logits


def _losses(objective: DrafterObjective, batch: Batch, logits: list[Tensor]) -> list[Tensor]:
    """The cross entropy of each depth's predictions."""
    return [cross_entropy(own, *truth) for own, truth in zip(logits, objective.truths(batch), strict=True)]
