"""The training objectives of BiTA, Hidden Transfer, Medusa and early heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from draftree.drafting.bita import SHALLOW
from draftree.drafting.folder import Trained
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import Plan, Surgery
from draftree.training.objective import DrafterObjective, cross_entropy, pick
from draftree.training.rows import Batch


class BiTAObjective(DrafterObjective):
    """Cross entropy of mask i against the token i + 1 places after its split point, mean over masks and splits.

    The real rows see no mask and nothing trained reaches them, so they pass first, without gradients.

    Args:
        trained, model: see `DrafterObjective`.
        prefix_dropout: share of the prompts' elements put to 0 in training (the authors' code: 0.1).

    Raises:
        ValueError: a dropout that is no share, or shallow prompts for an encoder-decoder.
    """

    learning_rate: ClassVar[float] = 3e-2
    splits: ClassVar[int | None] = 64

    def __init__(self, trained: Trained, model: Any, *, prefix_dropout: float = 0.1) -> None:
        super().__init__(trained, model)
        if not 0 <= prefix_dropout < 1:
            raise ValueError(f"prefix_dropout is {prefix_dropout}: give a share from 0 to below 1.")
        if self.weights.prompting == SHALLOW and self.target.encoder_decoder:
            raise ValueError(
                "Shallow prompts are made once, and what a decoder makes of them would depend on the source: take deep "
                "prompts for an encoder-decoder."
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
            surgeries=self.weights.surgeries(),
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
        """Return the plan: the real rows, and from layer t_i on one pseudo row of step i for each split point."""
        surgeries, before = [], 0
        for layer in sorted(set(self.transfer_layers)):
            steps = [i for i, t in enumerate(self.transfer_layers, 1) if t == layer]
            surgeries.append(self._surgery(batch, layer, steps, before))
            before += len(steps)
        return self.plan(batch, surgeries=tuple(surgeries))

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
            states = pick(hidden[:, :width], batch.splits).to(torch.float32)  # the type of what is trained
            return torch.cat([self.weights.transfer[i - 1](states) for i in steps], 1).to(hidden.dtype)

        return Surgery(
            layer,
            append=append,
            positions=self.within(torch.cat([batch.splits + i for i in steps], 1)),
            visible=torch.cat(rows, 1),
        )


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
    """Return the cross entropy of each depth."""
    return [cross_entropy(own, *truth) for own, truth in zip(logits, objective.truths(batch), strict=True)]
