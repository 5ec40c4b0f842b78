"""Define the training objectives of BiTA, Hidden Transfer, Medusa and early heads.

A batch is one plan of the hooked runner, with the rows, positions, visibility and surgeries of decoding at many split
points. So a row learns under the conditions under which it drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from draftree.drafting.bita import SHALLOW
from draftree.drafting.folder import Trained
from draftree.runner import layout_of
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import Plan, Surgery
from draftree.runner.target import inspect_model
from draftree.training.rows import Batch

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 50)


class Objective(nn.Module, ABC):
    """Base of the losses on batches of a model's own answers.

    Attributes:
        learning_rate: peak learning rate if the options of a run name none.
        splits: split points of a row in one pass; None for all.
        places: by depth, how many places after a split point the predicted token lies.
    """

    learning_rate: ClassVar[float] = 2e-3
    splits: int | None = None
    places: tuple[int, ...]
    accepts_loss_kwargs = False  # Hugging Face's trainer passes a batch alone to `forward`.

    @abstractmethod
    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss (a scalar) and, by depth, the logits [B, S, V] at the split points."""

    def truths(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return, by depth, the tokens [B, S] to predict and a mask [B, S] of the cases that have one."""
        return [batch.truth(place) for place in self.places]

    def forward(self, **fields: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch; in evaluation also the counts of correct predictions.

        `hits` [D, R] counts the cases of depth d whose true token was within the best `RANKS[r]`, `seen` [D] all cases.
        """
        batch = Batch(**fields)
        loss, logits = self.measure(batch)
        if self.training:
            return {"loss": loss}
        found = [hits_of(own, *truth) for own, truth in zip(logits, self.truths(batch), strict=True)]
        hits, seen = zip(*found, strict=True)
        return {"loss": loss, "hits": torch.stack(hits), "seen": torch.stack(seen)}


class DrafterObjective(Objective):
    """Base of the objectives of weights that draft or prune inside a frozen model.

    The model is not a submodule, so optimizers and checkpoints do not see its weights.

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
        self.layout = layout_of(self.target.model)

    def plan(self, batch: Batch, **more: Any) -> Plan:
        """Return the plan of a batch's real rows; `more` are further fields of `Plan`."""
        return Plan.causal(batch.tokens, prompt_lengths=tuple(batch.start.tolist()), **more)

    def encoder(self, batch: Batch) -> EncoderState | None:
        """Return the encoder state of the batch's sources; None for decoder-only models."""
        if batch.source is None or batch.source_length is None:
            return None
        state = EncoderState(self.target, batch.source.shape[0])
        for b, size in enumerate(batch.source_length.tolist()):
            state.admit(b, batch.source[b, :size])
        return state

    def within(self, positions: Tensor) -> Tensor:
        """Return positions limited to the last one of the context, as the engine does."""
        limit = self.target.max_positions
        return positions if limit is None else positions.clamp(max=limit - 1)

    @torch.no_grad()
    def tap(self, batch: Batch, layer: int) -> Tensor:
        """Return the input states [B, S, d] of layer `layer` at the split points; the last output for n layers."""
        plan = self.plan(batch, taps=(layer,), first_logit_row=batch.tokens.shape[1] - 1)
        hidden = self.runner.run_with_gradients(plan, encoder=self.encoder(batch)).hidden[layer]
        return pick(hidden, batch.splits)


class BiTAObjective(DrafterObjective):
    """Take the cross entropy of mask i and the token i + 1 places after its split point, mean over masks and splits.

    The real rows see no mask and nothing trained reaches them, so they pass first, without gradients.

    Args:
        trained, model: see `DrafterObjective`.
        prefix_dropout: share of the prompts' elements set to 0 in training (the authors' code: 0.1).

    Raises:
        ValueError: a dropout out of range, or shallow prompts for an encoder-decoder.
    """

    learning_rate: ClassVar[float] = 3e-2
    splits: int | None = 64

    def __init__(self, trained: Trained, model: Any, *, prefix_dropout: float = 0.1) -> None:
        super().__init__(trained, model)
        if not 0 <= prefix_dropout < 1:
            raise ValueError(f"prefix_dropout is {prefix_dropout}: give a share from 0 to below 1.")
        if self.weights.prompting == SHALLOW and self.target.encoder_decoder:
            raise ValueError(
                "Shallow prompts are computed once, and in an encoder-decoder they depend on the source: choose deep "
                "prompts."
            )
        self.prefix_dropout = prefix_dropout
        self.masks = int(self.weights.mask_embeddings.shape[0])
        self.places = tuple(range(2, self.masks + 2))

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        encoder, prefix = self.encoder(batch), self.prefix(len(batch.tokens))
        context = self.context(batch, encoder)
        logits = self.runner.run_with_gradients(self.packed(batch), prefix, encoder, context).logits
        logits = logits.unflatten(1, (-1, self.masks))  # [B, S, M, V]
        truth, there = (torch.stack(parts, -1) for parts in zip(*self.truths(batch), strict=True))
        return cross_entropy(logits, truth, there), list(logits.unbind(2))

    def context(self, batch: Batch, encoder: EncoderState | None = None) -> SlotCache:
        """Return the keys and values of the real rows, computed without gradients."""
        plan = self.plan(batch, first_logit_row=batch.tokens.shape[1] - 1)
        cache = self.runner.new_cache(plan.batch, plan.width)
        segments = self.runner.run(plan, cache, encoder=encoder).segments
        cache.commit([list(range(plan.width))] * plan.batch, segments)
        return cache

    def packed(self, batch: Batch) -> Plan:
        """Return the plan of one group of M masks for each split point, behind the context of the real rows."""
        masks = self.masks
        count, width = batch.tokens.shape
        splits = batch.splits.shape[1]
        device = batch.tokens.device
        order = torch.arange(1, masks + 1, device=device)
        context = torch.arange(width, device=device) <= batch.splits.repeat_interleave(masks, 1)[..., None]
        triangle = torch.ones(masks, masks, dtype=torch.bool, device=device).tril()
        groups = torch.block_diag(*[triangle] * splits).bool().expand(count, -1, -1)
        return Plan(
            tokens=batch.tokens.new_zeros(count, splits * masks),
            positions=self.within((batch.splits[..., None] + order).flatten(1)),
            visible=torch.cat([context, groups], 2),
            embeddings=self.weights.mask_embeddings.repeat(splits, 1).expand(count, -1, -1),
            prefix_rows=torch.ones(count, splits * masks, dtype=torch.bool, device=device),
            prompt_lengths=tuple(batch.start.tolist()),
        )

    def prefix(self, count: int) -> list[tuple[Tensor, Tensor]] | None:
        """Return the prompts per layer; in training each of `count` sequences has its own dropout."""
        held = self.weights.prefix()
        if held is None:
            return None
        if self.weights.prompting == SHALLOW:
            return self._shallow(count)
        if not self.training or self.prefix_dropout == 0:
            return held
        return [
            (self._drop(keys.expand(count, -1, -1, -1)), self._drop(values.expand(count, -1, -1, -1)))
            for keys, values in held
        ]

    def _shallow(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the model's keys and values of the prompts' embeddings; without dropout store them for drafting."""
        embeddings = self.weights.prompt_embeddings.expand(count if self.training else 1, -1, -1)
        embeddings = self._drop(embeddings) if self.training and self.prefix_dropout else embeddings
        cache = DynamicCache()
        arguments = {"inputs_embeds": embeddings.to(self.target.dtype), self.target.cache_argument: cache}
        self.target.model(**arguments, use_cache=True)
        layers: list[Any] = cache.layers
        found = [(layer.keys, layer.values) for layer in layers]
        if self.training:
            return found
        found = [(keys[0], values[0]) for keys, values in found]
        with torch.no_grad():
            for layer, (keys, values) in enumerate(found):
                self.weights.prompt_keys[layer] = keys
                self.weights.prompt_values[layer] = values
        return found

    def _drop(self, prompts: Tensor) -> Tensor:
        return F.dropout(prompts, self.prefix_dropout)


class HiddenTransferObjective(DrafterObjective):
    """Take KL(real state at j + i || pseudo state i of j), mean over split points j, summed over steps i.

    Args:
        trained, model: see `DrafterObjective`.
        on_pseudo: False trains each W_i alone: pseudo state i of j sees the real rows up to j + i - 1. With True it
            sees j's earlier pseudo states instead, as in decoding and in evaluation.
    """

    learning_rate: ClassVar[float] = 4e-3
    splits: int | None = 64

    def __init__(self, trained: Trained, model: Any, *, on_pseudo: bool = False) -> None:
        super().__init__(trained, model)
        self.transfer_layers = tuple(trained.settings["transfer_layers"])
        self.masked = bool(trained.settings["masked"])
        self.on_pseudo = on_pseudo
        self.places = tuple(range(2, len(self.transfer_layers) + 2))

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        result = self.runner.run_with_gradients(self.packed(batch), encoder=self.encoder(batch))
        splits, last = batch.splits.shape[1], batch.tokens.shape[1] - 1
        steps = list(result.logits.split(splits, 1))
        first = batch.splits[:, :1] + 1
        ahead = torch.arange(splits + len(steps) - 1, device=first.device)
        with torch.no_grad():
            rows = pick(result.hidden[len(self.target.layers)], (first + ahead).clamp(max=last))
            real = self.layout.finish(self.layout.head(self.layout.close(rows))).float().log_softmax(-1)
        loss = result.logits.new_zeros((), dtype=torch.float32)
        for i, pseudo in enumerate(steps, 1):
            _, there = batch.truth(i + 1)
            student = pseudo.float().log_softmax(-1)
            teacher = real[:, i - 1 :][:, :splits]  # Split points follow one another.
            apart = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
            loss = loss + (apart * there).sum() / there.sum().clamp(min=1)
        return loss, steps

    def packed(self, batch: Batch) -> Plan:
        """Return the plan: the real rows, and from layer t_i on one pseudo row of step i for each split point."""
        surgeries, before = [], 0
        for layer in sorted(set(self.transfer_layers)):
            steps = [i for i, t in enumerate(self.transfer_layers, 1) if t == layer]
            surgeries.append(self._surgery(batch, layer, steps, before))
            before += len(steps)
        # Only pseudo rows get logits here; those of real rows are made where they teach.
        more = {"taps": (len(self.target.layers),), "first_logit_row": batch.tokens.shape[1]}
        return self.plan(batch, surgeries=tuple(surgeries), **more)

    def _surgery(self, batch: Batch, layer: int, steps: Sequence[int], before: int) -> Surgery:
        """Return the surgery that appends the pseudo rows of `steps` (1-based) after those of `before` earlier ones."""
        count, width = batch.tokens.shape
        splits = batch.splits.shape[1]
        device = batch.tokens.device
        places = torch.arange(width, device=device)
        own = torch.eye(splits, dtype=torch.bool, device=device).expand(count, -1, -1)
        as_inference = self.on_pseudo or not self.training
        rows = []
        for i in steps:
            reach = batch.splits if as_inference else (batch.splits + i - 1).clamp(max=width - 1)
            seen = [places <= reach[..., None]]
            for other in range(1, before + len(steps) + 1):
                chained = as_inference and not self.masked and other < i
                seen.append(own if other == i or chained else torch.zeros_like(own))
            rows.append(torch.cat(seen, 2))

        def append(hidden: Tensor) -> Tensor:
            states = pick(hidden[:, :width], batch.splits).to(torch.float32)
            return torch.cat([self.weights.transfer[i - 1](states) for i in steps], 1).to(hidden.dtype)

        return Surgery(
            layer,
            append=append,
            positions=self.within(torch.cat([batch.splits + i for i in steps], 1)),
            visible=torch.cat(rows, 1),
        )


class MedusaObjective(DrafterObjective):
    """Take the cross entropy of head i and the token 2 + i places after the split point, summed with weights decay^i.

    Args:
        trained, model: see `DrafterObjective`.
        decay: weight of each head relative to the one before (the authors' code: 0.8).
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
    """Take the cross entropy of prediction i and the token i places after the split point, summed over i from 1.

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
    """Return the cross entropy of each depth."""
    return [cross_entropy(own, *truth) for own, truth in zip(logits, objective.truths(batch), strict=True)]


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` [B, S] of [B, N, x], as [B, S, x]."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def cross_entropy(logits: Tensor, truth: Tensor, there: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [.., V] and tokens [..] over the cases in the mask `there`, or 0."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), truth.flatten(), reduction="none")
    return (losses * there.flatten()).sum() / there.sum().clamp(min=1)


def hits_of(logits: Tensor, truth: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cases in the mask `there` whose true token is within the best `RANKS[r]` [R], and the number of cases.

    Of equal logits, which are frequent in 16 bits, the lower token is the better one, as in greedy decoding.
    """
    own, token = logits.gather(-1, truth[..., None]), torch.arange(logits.shape[-1], device=logits.device)
    better = ((logits > own) | ((logits == own) & (token < truth[..., None]))).sum(-1)
    ranks = torch.tensor(RANKS, device=logits.device, dtype=torch.long)
    return ((better[..., None] < ranks) & there[..., None]).flatten(0, 1).sum(0), there.sum()


METHODS: dict[str, type[DrafterObjective]] = {
    "bita": BiTAObjective,
    "hidden-transfer": HiddenTransferObjective,
    "medusa": MedusaObjective,
    "early-head": EarlyHeadObjective,
}
