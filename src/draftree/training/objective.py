"""What every training objective shares: a batch is one plan, the hooked runner runs it, predictions meet the truth.

The plan is the one of inference, for many split points at a time: the same rows, positions, visibility and surgeries,
so a row learns under the very conditions under which it will draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.drafting.folder import Trained
from draftree.runner import layout_of
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import Plan
from draftree.runner.target import inspect_model
from draftree.training.rows import Batch

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 50)


class Objective(nn.Module, ABC):
    """What is trained: loss and accuracy on batches of a model's own answers.

    Attributes:
        learning_rate: to begin with, where the options of a run name none.
        splits: split points of a row that are packed into one pass by default; None for all.
        places: how many places after a split point each depth predicts, in the order of the depths.
        lock: held while a batch passes.
    """

    learning_rate: ClassVar[float] = 1e-3
    splits: ClassVar[int | None] = None
    places: tuple[int, ...]
    lock: Any = nullcontext()
    accepts_loss_kwargs = False  # to Hugging Face's trainer: a batch is all that `forward` takes

    @abstractmethod
    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss (a scalar), and the logits [B, S, V] of every depth at the split points."""

    def truths(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """By depth, the tokens [B, S] to predict, and where there is one [B, S]."""
        return [batch.truth(place) for place in self.places]

    def forward(self, **fields: Tensor) -> dict[str, Tensor]:
        """The loss of a batch, given field by field; in evaluation also how often the truth was among the best.

        `hits` [D, R]: cases of depth d in which it was within the best `RANKS[r]`; `seen` [D]: cases.
        """
        batch = Batch(**fields)
        with self.lock:
            loss, logits = self.measure(batch)
        if self.training:
            return {"loss": loss}
        found = [hits_of(own, *truth) for own, truth in zip(logits, self.truths(batch), strict=True)]
        hits, seen = zip(*found, strict=True)
        return {"loss": loss, "hits": torch.stack(hits), "seen": torch.stack(seen)}


class DrafterObjective(Objective):
    """An objective of weights that draft inside a frozen model, or prune there.

    The model is no part of the module, so neither optimizers nor checkpoints ever see its weights.

    Args:
        trained: holds the weights.
        model: the frozen model that they are for.
    """

    weights: Any

    def __init__(self, trained: Trained, model: Any) -> None:
        super().__init__()
        self.weights = trained.weights
        self.target = inspect_model(model)
        self.runner = HookedRunner(self.target)
        self.lock = self.runner.lock
        self.layout = layout_of(self.target.model)

    # ---------------------------------------------------------------- for the methods

    def plan(self, batch: Batch, **more: Any) -> Plan:
        """The real rows of a batch; `more` are further fields of `Plan`."""
        return Plan.causal(batch.tokens, prompt_lengths=tuple(batch.start.tolist()), **more)

    def encoder(self, batch: Batch) -> EncoderState | None:
        """Cross attention of the batch's sources; None for decoder-only models."""
        if batch.source is None or batch.source_length is None:
            return None
        state = EncoderState(self.target, batch.source.shape[0])
        for b, size in enumerate(batch.source_length.tolist()):
            state.admit(b, batch.source[b, :size])
        return state

    def within(self, positions: Tensor) -> Tensor:
        """Positions, those beyond the context moved back to its last one, as the engine does."""
        limit = self.target.max_positions
        return positions if limit is None else positions.clamp(max=limit - 1)

    @torch.no_grad()
    def tap(self, batch: Batch, layer: int) -> Tensor:
        """The states [B, S, d] of the split points on their way into layer `layer` (or out of the last one)."""
        plan = self.plan(batch, taps=(layer,), first_logit_row=batch.tokens.shape[1] - 1)
        hidden = self.runner.run_with_gradients(plan, encoder=self.encoder(batch)).hidden[layer]
        return pick(hidden, batch.splits)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, S] of [B, N, x]: [B, S, x]."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def cross_entropy(logits: Tensor, truth: Tensor, there: Tensor) -> Tensor:
    """Mean cross entropy of logits [.., V] against tokens [..] over the cases that are `there`; 0 where none is."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), truth.flatten(), reduction="none")
    return (losses * there.flatten()).sum() / there.sum().clamp(min=1)


def hits_of(logits: Tensor, truth: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """In how many cases that are `there` the truth is within the best `RANKS[r]` [R], and how many there are.

    Of equal logits, as there are many in 16 bits, the lower token is the better one, as where tokens are chosen.
    """
    own, token = logits.gather(-1, truth[..., None]), torch.arange(logits.shape[-1], device=logits.device)
    better = ((logits > own) | ((logits == own) & (token < truth[..., None]))).sum(-1)
    ranks = torch.tensor(RANKS, device=logits.device, dtype=torch.long)
    return ((better[..., None] < ranks) & there[..., None]).flatten(0, 1).sum(0), there.sum()
