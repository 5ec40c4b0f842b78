"""Llama-shaped models in one plain loop of tensor operations: embed, layers, norm, head, without the stock `forward`.

The arithmetic is that of the stock modules, read from their weights. Query, key and value projections are one matrix
product, so are gate and up; grouped query heads are folded into query rows instead of repeating keys and values. The
runners of `cpu` and `cuda_graphs` are this one with other layers; models that do not fit are refused with a reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.runner.base import Runner
from draftree.runner.eager.layer import AngleTables, SegmentRows, TensorHead, TensorLayer, attend
from draftree.runner.eager.parts import (
    FAMILIES,
    FusedProduct,
    Norm,
    Parts,
    StockProduct,
    known_shape,
    logit_cap,
    may_copy,
)
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import PassResult, Plan, Segment, logit_slice, operate
from draftree.runner.positions import PassMasks
from draftree.runner.target import Target
from draftree.runner.weights.packed import PackedLinear, is_packed, linear_bytes
from draftree.runner.weights.stock import has_eight_bits


class EagerRunner(Runner):
    """Drives models of the families in `parts`; see `Runner`.

    Raises:
        ValueError: a model that does not qualify.
    """

    name = "eager"
    fuses = True  # linears that read the same rows, into one product with copies of their weights
    reads_8_bits = False  # weights that torchao keeps so, see `eight_bits`
    inference = True  # a tenth faster; safe since no stock module runs that could keep a tensor

    @classmethod
    def refusal(cls, target: Target) -> str | None:
        """See `Runner.refusal`: other families, models that were altered, weights on several devices."""
        reason = target.alteration
        if not known_shape(target):
            reason = f"only of the families {', '.join(FAMILIES)}"
        elif reason is None and len({p.device for p in target.model.parameters()}) > 1:
            reason = "its weights lie on several devices"
        elif reason is None and not cls.reads_8_bits and has_eight_bits(target.model):
            reason = "its weights have 8 bits"
        if reason is None:
            return None
        return (
            f"This '{target.model_type}' model does not qualify for runner={cls.name!r}, which drives stock models "
            f"alone, and {reason}: use runner='hooked' or runner='auto'."
        )

    def __init__(self, target: Target) -> None:
        refusal = self.refusal(target)
        if refusal is not None:
            raise ValueError(refusal)
        super().__init__(target)
        parts = [Parts.of(layer, target.config) for layer in target.layers]
        self.tables = AngleTables(target, parts[0].heads.dim)
        self._cap = parts[0].cap  # of attention scores
        self._norm, self._embedding = Norm.of(target.decoder.norm), target.model.get_input_embeddings()
        self._layers: list[Any]
        self._head: Any
        self._load(parts, target.model.get_output_embeddings(), logit_cap(target))

    def _load(self, parts: list[Parts], head: nn.Module, cap: float | None) -> None:
        """Lay out the weights of the layers' parts and the head: set `_layers` and `_head`; `cap` is the logits'."""
        product = StockProduct
        model = self.target.model
        if self.fuses and not is_packed(model) and may_copy(model, self.target.device, much_faster=False):
            product, self.copied_bytes = FusedProduct, linear_bytes(self.target)
        self._layers = [TensorLayer(part, product) for part in parts]
        self._head = TensorHead(self._norm, head, product, cap)

    # ---------------------------------------------------------------- a pass

    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        plan = plan.to(self.target.device)
        count = len(self._layers)
        cache.open(first, plan.batch, plan.width + plan.appended, bare=plan.bare)
        surgeries = {s.layer: s for s in plan.surgeries}
        segment = Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)
        segments, hidden = [segment], {}
        x = self._enter(plan)
        rows = self._rows(segment, plan, cache, first)
        stops = sorted({*surgeries, *plan.taps, count} - {0})
        for i, stop in zip([0, *stops], stops, strict=False):
            if i in surgeries:
                segment, x = operate(segment, surgeries[i], self._of_model(x), plan.width)
                x = self._own(x)
                segments.append(segment)
                rows = self._rows(segment, plan, cache, first)
            if i in plan.taps:
                hidden[i] = self._of_model(x).clone()  # layers may add to x in place
            x = self._advance(x, i, stop, rows)
        if count in plan.taps:
            hidden[count] = self._of_model(x)
        return PassResult(self._head(x[:, logit_slice(plan, segment)]), segments, hidden, self)

    def _enter(self, plan: Plan) -> Tensor:
        """Return the rows of a plan as they enter the first layer, [B, n, d]."""
        x = self._embedding(plan.tokens)
        if plan.embeddings is not None:
            x = torch.cat([x[:, : -plan.embeddings.shape[1]], plan.embeddings.to(x.dtype)], 1)
        return self._own(x)

    def _own(self, x: Tensor) -> Tensor:
        """Return rows of the model's dtype in the layers' dtype."""
        return x

    def _of_model(self, x: Tensor) -> Tensor:
        """Return the layers' rows in the model's dtype."""
        return x

    def _rows(self, segment: Segment, plan: Plan, cache: SlotCache, first: int) -> SegmentRows:
        """Return the angles and masks of a segment's rows."""
        masks = PassMasks(segment, cache, first, self.target.dtype, plain_row=True)
        return SegmentRows(self.tables, masks, cache, plan.prompt_lengths)

    def _advance(self, x: Tensor, first: int, last: int, rows: SegmentRows) -> Tensor:
        """Run the model's layers [first, last) on x [B, n, d], which may be changed."""
        for number in range(first, last):
            x = attend(self._layers[number], x, number, rows, self.target.kinds[number], self._cap)
        return x

    # ---------------------------------------------------------------- behind the layers

    @torch.inference_mode()
    def close(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden)

    @torch.inference_mode()
    def head(self, closed: Tensor) -> Tensor:
        head = self.target.model.get_output_embeddings()
        logits: Tensor = head(closed) if isinstance(head, PackedLinear) else F.linear(closed, head.weight)
        return logits

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits


class InPlaceRunner(EagerRunner):
    """The eager runner on the model's own weights, without a copy."""

    name = "in_place"
    fuses = False
