"""The hooked runner: any stock model through its own `forward`. `one_pass` says how a pass is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftree.runner.base import Runner, lock_of
from draftree.runner.hooked.model_layout import ModelLayout, anatomy_of
from draftree.runner.hooked.one_pass import HookedPass, StockModel
from draftree.runner.kv.cache import GradientCache, SlotCache
from draftree.runner.plan import PassResult, Plan
from draftree.runner.target import Target, rows_of


class HookedRunner(Runner):
    """Drives any decoder-only model, and the decoder of an encoder-decoder, through `forward`."""

    name = "hooked"
    copies = False

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.lock = lock_of(target.model)
        self._stock = StockModel.of(target)

    def _one_row(self, cache: SlotCache | None = None, taps: tuple[int, ...] = ()) -> PassResult:
        """Pass one row through the model, for those that watch."""
        target, encoder = self.target, None
        # A token of the middle of the vocabulary: token 0 is often padding, whose embedding may be all zeros.
        one = torch.full((1, 1), rows_of(target.model) // 2, dtype=torch.long, device=target.device)
        if target.encoder_decoder:
            encoder = self.new_encoder(1)
            encoder.admit(0, one[0].repeat(2))
        row = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
        cache = self.new_cache(1) if cache is None else cache
        return self.run(Plan(one, torch.zeros_like(one), row, taps=taps), cache, encoder=encoder)

    @torch.no_grad()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        return self._run(plan, cache, first, encoder)

    @torch.no_grad()
    def close(self, hidden: Tensor) -> Tensor:
        return self.anatomy.close(hidden)

    @torch.no_grad()
    def head(self, closed: Tensor) -> Tensor:
        return self.anatomy.head(closed)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        anatomy = self.anatomy
        return anatomy.finish(anatomy.head(anatomy.close(hidden)))

    @cached_property
    def anatomy(self) -> ModelLayout:
        """The facts of the model that one pass of a row shows; see `anatomy_of`."""
        return anatomy_of(self.target, self._one_row)

    def run_with_gradients(
        self,
        plan: Plan,
        prefix: Sequence[tuple[Tensor, Tensor]] | None = None,
        encoder: Any = None,
        context: SlotCache | None = None,
    ) -> PassResult:
        """Pass rows through the model, differentiable in the plan's embeddings, prefix and surgeries.

        There is nothing to commit afterwards. `prefix` is the deep prefix, per layer (keys, values), each [kv heads, P,
        head dim] or [B, ..]; `encoder` as of `run`; `context` has been filled by `run`, with equally many columns in
        every slot, and None stands for whole sequences.
        """
        return self._run(plan, GradientCache(len(self.target.layers), plan.batch, prefix, context), 0, encoder)

    def _run(self, plan: Plan, cache: SlotCache, first: int, encoder: Any) -> PassResult:
        if self.target.model.training:
            self.target.refuse_training()
        if self.target.encoder_decoder and encoder is None:
            raise ValueError(f"'{self.target.model_type}' has an encoder: pass its EncoderState as `encoder`.")
        with self.lock:  # whoever looks at the model meanwhile must not take a pass's hooks for the user's
            cache.open(first, plan.batch, plan.width + plan.appended, bare=plan.bare)
            result = HookedPass(self._stock, plan, cache, first, encoder).run()
        result.runner = self
        return result
