"""The loop host: llama-shaped models in one plain loop, with fused projections and as few operations as possible.

Embed, layers, norm, head: the same arithmetic as the stock modules, read from their weights. Query, key and value
projections are one matrix product, so are gate and up; grouped query heads are folded into query rows instead of
repeating keys and values. A layer comes in two forms, compiled (`compiled`) where the model is float32 on a CPU and in
tensor operations (`layer`) elsewhere. Taken where the model qualifies (`LoopHost.qualifies`), refused where it does
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.host.ahead import Course, runner_of
from draftree.host.base import Host
from draftree.host.cache import SlotCache
from draftree.host.compiled import ABI, CompiledAngles, CompiledHead, CompiledLayer, CompiledStack, load_library
from draftree.host.layer import Angles, Norm, Parts, TensorHead, TensorLayer
from draftree.host.masks import LayerKind, PassMasks, limits
from draftree.host.panels import PackedLinear
from draftree.host.plan import PassResult, Plan, Segment, logit_slice, operate
from draftree.host.positions import is_length_dependent, per_row_angles
from draftree.host.product import may_copy
from draftree.host.target import Target

SHAPED_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
STOCK_MODULES = ("torch.nn.", "transformers.")
OUTPUT_HOOKS = ("transformers.utils.output_capturing",)
ANGLE_BLOCK = 1024  # positions by which the table of rotary angles grows


class LoopHost(Host):
    """Drives llama, mistral, qwen2 and qwen3 shaped models without their `forward`."""

    name = "loop"
    guard = torch.inference_mode  # a tenth faster; safe since no stock module runs that could keep a tensor

    @staticmethod
    def qualifies(target: Target) -> bool:
        """Whether the model is of a known shape and in its stock state.

        Adapters, quantised linears, offloading hooks or weights on several devices all say no.
        """
        if target.model_type not in SHAPED_LIKE_LLAMA or target.encoder_decoder:
            return False
        if type(target.model).__module__.split(".")[0] != "transformers":
            return False
        if getattr(target.config, "hidden_act", None) != "silu":
            return False
        for module in target.model.modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            # A model once asked for hidden states keeps hooks of transformers, which only look.
            if hasattr(module, "_hf_hook") or any(
                getattr(hook, "__module__", None) not in OUTPUT_HOOKS for hook in hooks
            ):
                return False
            if type(module) is PackedLinear:  # by `pack_weights`, and not moved or cast since
                if module.panels.dtype != torch.float32 or not module.panels.is_cpu:
                    return False
                continue
            if not type(module).__module__.startswith(STOCK_MODULES):
                return False
            if "Linear" in type(module).__name__ and type(module) is not nn.Linear:
                return False
        return len({p.device for p in target.model.parameters()}) == 1

    def __init__(self, target: Target) -> None:
        if not self.qualifies(target):
            raise ValueError(
                f"This '{target.model_type}' model does not qualify for the loop host (it drives stock "
                f"{', '.join(SHAPED_LIKE_LLAMA)} models without adapters, quantisation or offloading): "
                "use host='hooked' or host='auto'."
            )
        super().__init__(target)
        library = load_library() if target.dtype == torch.float32 and target.device.type == "cpu" else None
        packed = any(isinstance(module, PackedLinear) for module in target.model.modules())
        copy = packed or may_copy(target.model, target.device, compiled=library is not None)
        self._rotary = target.decoder.rotary_emb
        self._per_row = is_length_dependent(self._rotary)
        self._stack: CompiledStack | None = None  # where layers are compiled
        parts = [Parts.of(layer, target.config) for layer in target.layers]
        self._norm, head = Norm.of(target.decoder.norm), target.model.get_output_embeddings()
        self._layers: list[Any]
        self._head: Any
        if library is None or not copy:
            self._layers, self._head = [TensorLayer(part, copy) for part in parts], TensorHead(self._norm, head, copy)
        else:
            self.form = f"{self.name}, compiled {ABI}"
            self._layers = [CompiledLayer(library, part) for part in parts]
            self._head = _CompiledHead(library, self._norm, head)
            self._stack = CompiledStack(library, self._layers)
        self._embedding = target.model.get_input_embeddings()
        self._runner = None if self._per_row else runner_of(library, self._stack, self._head, self._embedding)
        self._cosines = self._sines = torch.empty(0)

    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """See `Host.run`."""
        appended = sum(s.positions.shape[1] for s in plan.surgeries if s.positions is not None)
        cache.open(first, plan.batch, plan.width + appended)
        surgeries = {s.layer: s for s in plan.surgeries}
        segment = Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)
        segments, hidden = [segment], {}
        x = self._embedding(plan.tokens)
        if plan.embeddings is not None:
            x = torch.cat([x[:, : -plan.embeddings.shape[1]], plan.embeddings.to(x.dtype)], 1)
        rows = _Rows(self, segment, plan, cache, first, x)
        stops = sorted({*surgeries, *plan.taps, len(self._layers)} - {0})
        for i, stop in zip([0, *stops], stops, strict=False):
            if i in surgeries:
                segment, x = operate(segment, surgeries[i], x, plan.width)
                segments.append(segment)
                rows = _Rows(self, segment, plan, cache, first, x)
            if i in plan.taps:
                hidden[i] = x.clone()  # layers may add to x in place
            x = self._advance(x, i, stop, rows)
        if len(self._layers) in plan.taps:
            hidden[len(self._layers)] = x
        return PassResult(self._head(x[:, logit_slice(plan, segment)]), segments, hidden, self)

    def run_ahead(
        self,
        cache: SlotCache,
        first: int,
        positions: Sequence[int],
        given: np.ndarray,
        best: int,
        least: float,
        ends: Sequence[int] = (),
        taking_part: Sequence[bool] = (),
    ) -> Course | None:
        """See `Host.run_ahead`."""
        batch, steps = given.shape
        reach = max(cache.lengths[first : first + batch]) + steps
        if self._runner is None or any(limits(kind, reach) for kind in self.target.kinds):
            return None
        longest = max(positions) + steps
        if longest > self._cosines.shape[0]:
            self._grow_angles(longest, self.target.dtype, self.target.device)
        cache.open(first, batch, steps)
        tables = self._cosines, self._sines
        taking_part = taking_part or [True] * batch
        return self._runner.run(cache, tables, positions, given, best, least, ends, taking_part)

    @torch.inference_mode()
    def close(self, hidden: Tensor) -> Tensor:
        """See `Host.close`."""
        return self._norm(hidden)

    @torch.inference_mode()
    def head(self, closed: Tensor) -> Tensor:
        """See `Host.head`."""
        if isinstance(self._head, _CompiledHead):
            return self._head.product(closed)
        return F.linear(closed, self.target.model.get_output_embeddings().weight)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Host.logits`."""
        logits: Tensor = self._head(hidden)
        return logits

    def _advance(self, x: Tensor, first: int, last: int, rows: _Rows) -> Tensor:
        """Layers [first, last) on x [B, n, d], which may be changed."""
        kinds = self.target.kinds[first:last]
        if isinstance(rows.angles, CompiledAngles) and not any(rows.masks.limited(kind) for kind in set(kinds)):
            assert self._stack is not None
            self._stack.run(first, last, x, rows.angles)
            return x
        for i, kind in enumerate(kinds, first):
            x = _attend(self._layers[i], x, i, rows, kind)
        return x

    def angles(
        self, segment: Segment, floor: tuple[int, ...], dtype: torch.dtype, cache: SlotCache
    ) -> Angles | CompiledAngles:
        """The angles of the segment's rows, in the form that the layers take."""
        if self._per_row:
            cosine, sine = per_row_angles(self._rotary, segment.positions, floor, dtype)
            sine = _fold_sign(sine)
        else:
            longest = int(segment.positions.max()) + 1
            if longest > self._cosines.shape[0]:
                self._grow_angles(longest, dtype, segment.positions.device)
            cosine, sine = (F.embedding(segment.positions, table) for table in (self._cosines, self._sines))
        angles = Angles(cosine[:, :, None], sine[:, :, None], cache)
        return angles if self._stack is None else CompiledAngles(angles, segment, self._stack)

    def _grow_angles(self, longest: int, dtype: torch.dtype, device: torch.device) -> None:
        count = -(-longest // ANGLE_BLOCK) * ANGLE_BLOCK
        like = torch.empty(1, 1, 1, dtype=dtype, device=device)
        cosine, sine = self._rotary(like, position_ids=torch.arange(count, device=device)[None])
        self._cosines, self._sines = cosine[0], _fold_sign(sine[0])


class _CompiledHead(CompiledHead):
    """The compiled head, whose product can be had without its norm: these weights are in the caches already."""

    def product(self, read: Tensor) -> Tensor:
        """Logits [B, n, V] of normed states [B, n, d]."""
        read = read.contiguous()
        matrix = self._packed.described
        logits = read.new_empty(*read.shape[:2], matrix.outputs)
        rows = read.shape[0] * read.shape[1]
        self._library.layer_product(matrix, read.data_ptr(), rows, torch.get_num_threads(), 0, logits.data_ptr())
        return logits


def _fold_sign(sine: Tensor) -> Tensor:
    """Negate the first half, so that rotating halves is a plain roll."""
    half = sine.shape[-1] // 2
    return torch.cat([-sine[..., :half], sine[..., half:]], -1)


class _Rows:
    """What all layers of one segment share: angles and masks."""

    def __init__(self, host: LoopHost, segment: Segment, plan: Plan, cache: SlotCache, first: int, x: Tensor) -> None:
        self.angles = host.angles(segment, plan.rope_floor, x.dtype, cache)
        self.masks = PassMasks(segment, cache, first, x.dtype, plain_row=True)
        self.row_by_row = plan.row_by_row
        self._columns: dict[LayerKind, list[list[Tensor]]] = {}
        self._folded: dict[tuple[LayerKind, int], Tensor | None] = {}

    def mask(self, kind: LayerKind, groups: int) -> Tensor | None:
        """The additive mask repeated for every query head of a group: [B, 1, groups * n, K]."""
        key = (kind, groups)
        if key not in self._folded:
            mask = self.masks.additive(kind)
            if mask is not None and groups > 1 and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, groups, 1)
            self._folded[key] = mask
        return self._folded[key]

    def columns(self, kind: LayerKind) -> list[list[Tensor]]:
        """The columns that each row of each request sees, in order."""
        if kind not in self._columns:
            self._columns[kind] = [[row.nonzero()[:, 0] for row in seen] for seen in self.masks.boolean(kind)]
        return self._columns[kind]


def _attend(layer: Any, x: Tensor, index: int, rows: _Rows, kind: LayerKind) -> Tensor:
    """The whole of a layer: its first half, attention, its second half; may change and return x [B, n, d]."""
    scaling = float(layer.parts.attention.scaling)
    query, keys, values = layer.enter(x, rows.angles, index)
    if rows.row_by_row:
        mixed = _attend_row_by_row(query, keys, values, rows.columns(kind), scaling)
    else:
        mask = rows.mask(kind, layer.parts.heads.groups)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return layer.leave(x, mixed, rows.angles)


def _attend_row_by_row(
    query: Tensor, keys: Tensor, values: Tensor, columns: list[list[Tensor]], scaling: float
) -> Tensor:
    """The attention calls of one-row passes: a column that is masked away would still change the order of sums."""
    mixed = torch.empty_like(query)
    for b, of_rows in enumerate(columns):
        for i, index in enumerate(of_rows):
            own = slice(i, None, len(of_rows))  # row i in every head of the group
            key, value = (t[b : b + 1].index_select(2, index) for t in (keys, values))
            mixed[b : b + 1, :, own] = F.scaled_dot_product_attention(
                query[b : b + 1, :, own], key, value, scale=scaling
            )
    return mixed
