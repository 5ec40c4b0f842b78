"""Objectives of heads that read states of the plain pass: Medusa's and early heads (methods.md sections 5 and 7)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftree.drafting.folder import Trained
from draftree.training.objective import Objective, cross_entropy
from draftree.training.rows import Batch


class MedusaObjective(Objective):
    """Cross entropy of head i against the token 2 + i places after the split point, summed with weights decay^i.

    Args:
        trained: holds `MedusaWeights`.
        model: the frozen model.
        decay: weight of each head relative to the one before (the authors' code: 0.8); 1 weighs all alike.
    """

    def __init__(self, trained: Trained, model: Any, *, decay: float = 1.0) -> None:
        super().__init__(trained, model)
        if not 0 < decay <= 1:
            raise ValueError(f"decay is {decay}: give a number over 0 and at most 1.")
        self.decay = decay
        self.places = tuple(range(2, int(trained.settings["heads"]) + 2))

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """See `Objective.measure`."""
        states = self.anatomy.close(self.tap(batch, len(self.target.layers)))
        logits = list(self.weights(states, self.anatomy.head))
        losses = [cross_entropy(guess, *batch.truth(place)) for guess, place in zip(logits, self.places, strict=True)]
        return sum((self.decay**i * loss for i, loss in enumerate(losses)), losses[0] * 0), logits


class EarlyHeadObjective(Objective):
    """Cross entropy of the early head against the model's own next token, as in its greedy answers.

    Args:
        trained: an `EarlyHead`.
        model: the frozen model.
    """

    places = (1,)

    def __init__(self, trained: Trained, model: Any) -> None:
        super().__init__(trained, model)
        self.layer = int(trained.settings["layer"])

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """See `Objective.measure`."""
        logits = self.weights(self.tap(batch, self.layer), self.anatomy.head)
        return cross_entropy(logits, *batch.truth(1)), [logits]
