"""Hidden Transfer's objective: pseudo states are to predict what the real ones will."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.drafting.folder import Trained
from draftree.runner.plan import Plan, Surgery
from draftree.training.objective import DrafterObjective, pick
from draftree.training.rows import Batch


class HiddenTransferObjective(DrafterObjective):
    """KL(real state at j + i || pseudo state i of j), mean over split points j, summed over steps i.

    Args:
        trained, model: see `DrafterObjective`. The settings say after which layers, and whether pseudo states see each
            other (`masked`, the paper's ablation; it shows in training with `on_pseudo` alone).
        on_pseudo: False trains each W_i alone: pseudo state i of j sees the real rows up to j + i - 1. True lets it
            see j's earlier pseudo states in place of the real ones, as at inference and always in evaluation.
    """

    splits: ClassVar[int | None] = 64

    def __init__(self, trained: Trained, model: Any, *, on_pseudo: bool = False) -> None:
        super().__init__(trained, model)
        self.transfer_layers = tuple(trained.settings["transfer_layers"])
        self.masked = bool(trained.settings["masked"])
        self.on_pseudo = on_pseudo
        self.places = tuple(range(2, len(self.transfer_layers) + 2))

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        logits = self.runner.run_with_gradients(self.packed(batch), encoder=self.encoder(batch)).logits
        width, splits = batch.tokens.shape[1], batch.splits.shape[1]
        real = logits[:, :width].detach()
        steps = list(logits[:, width:].split(splits, 1))
        loss = logits.new_zeros((), dtype=torch.float32)
        for i, pseudo in enumerate(steps, 1):
            _, there = batch.truth(i + 1)
            teacher = pick(real, (batch.splits + i).clamp(max=width - 1)).float().log_softmax(-1)
            student = pseudo.float().log_softmax(-1)
            apart = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
            loss = loss + (apart * there).sum() / there.sum().clamp(min=1)
        return loss, steps

    def packed(self, batch: Batch) -> Plan:
        """Real rows; behind them from layer t_i on, for each step i, one pseudo row a split point."""
        surgeries, before = [], 0
        for layer in sorted(set(self.transfer_layers)):
            steps = [i for i, t in enumerate(self.transfer_layers, 1) if t == layer]
            surgeries.append(self._surgery(batch, layer, steps, before))
            before += len(steps)
        return self.plan(batch, surgeries=tuple(surgeries))

    def _surgery(self, batch: Batch, layer: int, steps: Sequence[int], before: int) -> Surgery:
        """Append the pseudo rows of `steps` (1-based) behind those of the `before` steps that are there."""
        count, width = batch.tokens.shape
        splits = batch.splits.shape[1]
        device = batch.tokens.device
        columns = torch.arange(width, device=device)
        own = torch.eye(splits, dtype=torch.bool, device=device).expand(count, -1, -1)
        as_inference = self.on_pseudo or not self.training
        rows = []
        for i in steps:
            reach = batch.splits if as_inference else (batch.splits + i - 1).clamp(max=width - 1)
            seen = [columns <= reach[..., None]]
            for other in range(1, before + len(steps) + 1):
                chained = as_inference and not self.masked and other < i
                seen.append(own if other == i or chained else torch.zeros_like(own))
            rows.append(torch.cat(seen, 2))

        def append(hidden: Tensor) -> Tensor:
            states = pick(hidden[:, :width], batch.splits).to(torch.float32)  # the type of what is trained
            return torch.cat([self.weights.transfer[i - 1](states) for i in steps], 1).to(hidden.dtype)

        return Surgery(
            layer,
            append=append,
            positions=self.within(torch.cat([batch.splits + i for i in steps], 1)),
            visible=torch.cat(rows, 1),
        )
