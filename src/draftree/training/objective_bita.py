"""BiTA's objective: mask groups behind many split points, all in one pass.

The real rows need no gradients, as nothing that is trained reaches them: they pass first, and masks see their keys and
values as a context. That takes 28 to 35 % of a step's time away.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from draftree.drafting.bita import SHALLOW
from draftree.drafting.folder import Trained
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import Plan
from draftree.training.objective import DrafterObjective, cross_entropy
from draftree.training.rows import Batch


class BiTAObjective(DrafterObjective):
    """Cross entropy of mask i against the token i + 1 places after its split point, mean over masks and splits.

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
        """Keys and values of the real rows: they see no mask, so they go first, and no gradients are followed there."""
        plan = self.plan(batch, first_logit_row=batch.tokens.shape[1] - 1)
        cache = self.runner.new_cache(plan.batch, plan.width)
        segments = self.runner.run(plan, cache, encoder=encoder).segments
        cache.commit([list(range(plan.width))] * plan.batch, segments)
        return cache

    def packed(self, batch: Batch) -> Plan:
        """One group of M masks for each split point, behind the context of the real rows."""
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
        """The prompts per layer, with dropout of their own for each of `count` sequences in training."""
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
        """What the model makes of the prompts' embeddings; kept in the weights, for drafting, where nothing drops."""
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
