"""Llama-shaped models in float32 or bfloat16 on a CPU: the loop of `eager` with layers and head in C.

Layers whose rows turn by the same angles go through in one call (`CompiledStack`).

`pack_weights` packs a model's linears in place: the runner's speed without a second copy of the weights. A packed model
computes and saves the same. Its weights are no longer parameters, so it cannot be trained, and code that reads `weight`
gets copies. `unpack_weights` reverses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from draftree.native import ABI, load_library
from draftree.runner.cpu.layers import CompiledAngles, CompiledHead, CompiledLayer, CompiledStack, threads_for
from draftree.runner.cpu.states import CompiledStates
from draftree.runner.eager.parts import FAMILIES, HYBRIDS, Parts, known_shape, may_copy, products_of
from draftree.runner.eager.runner import EagerRunner, SegmentRows
from draftree.runner.kv.cache import BLOCK, SlotCache
from draftree.runner.plan import PassResult, Plan, Segment, logit_slice
from draftree.runner.positions import LayerKind
from draftree.runner.recurrent.cache import RecurrentCache
from draftree.runner.target import Target, inspect_model
from draftree.runner.weights.blocks import PackedEmbedding
from draftree.runner.weights.packed import (
    LANES,
    MUCH,
    PackedLinear,
    in_16_bits,
    is_packed,
    linear_bytes,
    misfit,
    side_by_side,
    to_packed,
)
from draftree.runner.weights.stock import has_eight_bits


@torch.no_grad()
def pack_weights(model: Any) -> None:
    """Pack the linears of the decoder layers, and an untied head, one layer at a time.

    Args:
        model: a Hugging Face model in float32 or bfloat16 on the CPU that the eager runner drives.

    Raises:
        ValueError: a model that the eager runner does not drive, of another type or on another device, weights that
            cannot be laid so, or no compiled library.
    """
    target = inspect_model(model)
    hybrid = known_shape(target, HYBRIDS) and target.alteration is None and not has_eight_bits(model)
    if not hybrid and not EagerRunner.qualifies(target):
        raise ValueError(
            f"This '{target.model_type}' model does not qualify for the eager runner, and nothing else reads packed "
            "weights: leave it as it is."
        )
    if target.dtype not in TYPES or target.device.type != "cpu":
        raise ValueError(
            "Weights are packed in float32 or bfloat16 on the CPU, and these are "
            f"{target.dtype} on {target.device.type}: leave the model as it is, or move it first."
        )
    reason = misfit(products_of(target))
    if reason is not None:
        raise ValueError(f"This model's weights cannot be packed, as {reason}: leave it as it is.")
    if load_library() is None:
        raise ValueError(
            "Packed weights need the compiled layers, which are missing or stale: install a C compiler and reinstall "
            "draftree; in a clone of it, run python hatch_build.py."
        )
    for layer in target.layers:
        for linears in Parts.of(layer, target.config).linears():
            _replace(layer, linears)
    head, embedding = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight is not embedding.weight:
        _replace(target.model, [head])


def pack_own(model: Any, runner: str) -> None:
    """Pack a newly loaded model in place if the runner would otherwise copy much of it."""
    if runner not in ("auto", "cpu"):
        return
    with suppress(TypeError, ValueError):
        if linear_bytes(inspect_model(model)) >= MUCH:
            pack_weights(model)


@torch.no_grad()
def unpack_weights(model: Any) -> None:
    """Replace packed linears by ordinary ones, whose new parameters require gradients as Hugging Face's do."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, PackedLinear):
                linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
                linear.weight = nn.Parameter(module.weight)
                linear.register_parameter("bias", module.bias)
                setattr(parent, name, linear.train(module.training))
            elif isinstance(module, PackedEmbedding):
                setattr(parent, name, module.unpacked())
    if getattr(model.config, "tie_word_embeddings", False):
        model.tie_weights()


def _replace(parent: nn.Module, linears: Sequence[Any]) -> None:
    """Pack linears below `parent` that read the same input, in one piece of memory if groups of outputs allow it."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return  # packed already
    if any(linear.out_features % LANES for linear in linears[:-1]):
        for linear in linears:
            _replace(parent, [linear])
        return
    packed, dtype = to_packed(in_16_bits(side_by_side(linears))), linears[0].weight.dtype
    counts = [-(-linear.out_features // LANES) for linear in linears]
    for linear, own in zip(linears, packed.split(counts), strict=True):
        made = PackedLinear(own, linear.out_features, linear.bias, dtype).train(linear.training)
        for module in list(parent.modules()):
            for name, child in list(module.named_children()):
                if child is linear:
                    setattr(module, name, made)


TYPES = (torch.float32, torch.bfloat16)


class CpuRows(SegmentRows):
    """`SegmentRows` with angles for C; the last layer's first `unread` rows are not read."""

    def __init__(self, stack: CompiledStack, unread: int, rows: SegmentRows) -> None:
        vars(self).update(vars(rows))
        self._stack, self.unread = stack, unread

    def look_up(self, kind: LayerKind) -> CompiledAngles:
        return CompiledAngles(super().look_up(kind), self.masks.segment, self._stack)


class CpuRunner(EagerRunner):
    """Drives models of the families in `eager.parts`; see `Runner`."""

    name = "cpu"
    # Batches with trees of different sizes leave padding out. Lookahead in a batch of four at 60M parameters, one
    # thread: 210 tokens a second with it, 175 without.
    packs = True
    independent_rows = True
    reads_8_bits = True
    families = (*FAMILIES, *HYBRIDS)

    @classmethod
    def refusal(cls, target: Target) -> str | None:
        reason = super().refusal(target)
        if reason is not None:
            return reason
        if target.dtype not in TYPES or target.device.type != "cpu" or load_library() is None:
            return (
                "runner='cpu' is for float32 and bfloat16 on a CPU where the package was built with a C compiler: use "
                "runner='auto' for what this machine has."
            )
        reason = misfit([*products_of(target), [target.model.get_output_embeddings()]])
        if reason is not None:
            return f"This model does not qualify for runner='cpu', as {reason}: use runner='auto'."
        if not is_packed(target.model) and not may_copy(target.model, target.device, much_faster=True):
            return (
                "There is too little free memory for the copy of the weights that runner='cpu' reads: call "
                "draftree.pack_weights(model) first, or use runner='in_place'."
            )
        return None

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.form = f"{self.name} {ABI}"
        # A recurrent state rounds by the number of tokens that a commit moves it over.
        self.independent_rows = target.recurrence is None

    def new_cache(
        self, slots: int, capacity: int = BLOCK, prefix: list[tuple[Tensor, Tensor]] | None = None
    ) -> SlotCache:
        recurrence, layers = self.target.recurrence, self._layers
        if recurrence is None:
            return super().new_cache(slots, capacity, prefix)
        given = recurrence, len(layers), slots, capacity, prefix
        return CompiledStates(self._library, layers, threads_for, *given)

    def _load(self, parts: list[Parts], head: nn.Module, cap: float | None) -> None:
        library = load_library()
        assert library is not None
        self._library = library
        dtype = self.target.dtype
        self._layers = [
            CompiledLayer(part, kind.window, self.tables.rotation, dtype)
            for part, kind in zip(parts, self.target.kinds, strict=True)
        ]
        self._head = CompiledHead(library, self._norm, head, dtype, cap)
        self.stack = CompiledStack(library, self._layers, dtype)
        self.copied_bytes = self._head.copied + sum(layer.copied for layer in self._layers)

    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        if isinstance(cache, RecurrentCache):
            cache.open(first, plan.batch, plan.width + plan.appended, bare=plan.bare)
            cache.begin(plan, [])
        ragged = plan.sizes is not None and plan.unchanged and min(plan.sizes) < plan.width
        if not ragged or len(self.tables.tables) > 1 or self.tables.by_length:
            return super().run(plan, cache, first)
        return self._run_packed(plan, cache, first)

    def _run_packed(self, plan: Plan, cache: SlotCache, first: int) -> PassResult:
        """Run a pass without the rows beyond the plan's `sizes`; their logits are 0."""
        assert plan.sizes is not None
        cache.open(first, plan.batch, plan.width)
        segment = Segment(0, None, plan.positions, plan.visible)
        real = (
            torch.arange(plan.width, device="cpu") < torch.tensor(plan.sizes, dtype=torch.long, device="cpu")[:, None]
        )
        turned = plan.angle_positions(plan.positions)[real][None]
        angles = self.tables.of(turned, (), self.target.dtype, cache, self.target.kinds[0])
        x = self._embedding(plan.tokens[real])[None].float()

        def padded(rows: Tensor) -> Tensor:
            made = rows.new_zeros(plan.batch, plan.width, rows.shape[1])
            made[real] = rows
            return made

        described, hidden, begin = CompiledAngles(angles, segment, self.stack, plan.sizes), {}, 0
        for end in sorted({*plan.taps, len(self._layers)}):
            if end:
                self.stack.run(begin, end, x, described)
            begin = end
            if end in plan.taps:
                hidden[end] = padded(self._of_model(x[0]))
        logits = padded(self._head(x)[0])
        return PassResult(logits[:, logit_slice(plan, segment)], [segment], hidden, self)

    def _own(self, x: Tensor) -> Tensor:
        return x.float()

    def _of_model(self, x: Tensor) -> Tensor:
        return x.to(self.stack.dtype)

    def _rows(self, segment: Segment, plan: Plan, cache: SlotCache, first: int) -> SegmentRows:
        unread = plan.first_logit_row if plan.plain and plan.batch == 1 else 0  # a prompt's, but for its last one
        return CpuRows(self.stack, unread, super()._rows(segment, plan, cache, first))

    def _advance(self, x: Tensor, first: int, last: int, rows: CpuRows) -> Tensor:  # type: ignore[override]
        kinds = self.target.kinds
        for _, group in groupby(range(first, last), key=lambda i: self.tables.name(kinds[i])):
            some = list(group)
            unread = rows.unread if some[-1] == len(self._layers) - 1 else 0
            self.stack.run(some[0], some[-1] + 1, x, rows.angles(kinds[some[0]]), unread)
        return x

    @torch.inference_mode()
    def head(self, closed: Tensor) -> Tensor:
        return self._head.product(closed)
