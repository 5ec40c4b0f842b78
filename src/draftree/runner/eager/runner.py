"""The eager runner: llama-shaped models in one plain loop, with fused projections and as few operations as possible.

Embed, layers, norm, head: the same arithmetic as the stock modules, read from their weights. Query, key and value
projections are one matrix product, so are gate and up; grouped query heads are folded into query rows instead of
repeating keys and values. A layer comes in two forms, compiled (`compiled`) where the model is float32 on a CPU and in
tensor operations (`layer`) elsewhere. Taken where the model qualifies (`EagerRunner.qualifies`), refused where it does
not.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.runner.base import Runner
from draftree.runner.cpu.ahead import AheadPlan, ChainRunner, Course, chain_runner_of
from draftree.runner.cpu.layers import ABI, CompiledAngles, CompiledHead, CompiledLayer, CompiledStack, load_library
from draftree.runner.cpu.one_call import OneCall
from draftree.runner.cpu.packed import PackedLinear
from draftree.runner.cuda_graphs.capture import capture_for
from draftree.runner.cuda_graphs.passes import CapturedPasses
from draftree.runner.eager.attention import attend
from draftree.runner.eager.inductor import InductorLayer, check_compiler
from draftree.runner.eager.layer import Angles, TensorHead, TensorLayer
from draftree.runner.eager.parts import FAMILIES, TURN_NEIGHBOURS, Norm, Parts, known_shape
from draftree.runner.eager.product import may_copy, may_pack
from draftree.runner.eager.rows import SegmentRows
from draftree.runner.kv.cache import BLOCK, SlotCache
from draftree.runner.layout.masks import LayerKind, limits
from draftree.runner.layout.positions import is_length_dependent, per_row_angles
from draftree.runner.layout.rotary import RotaryTable, Rotation, width_of
from draftree.runner.layout.skip import Skip
from draftree.runner.own_type import in_own_type
from draftree.runner.plan import PassResult, Plan, Segment, logit_slice, operate
from draftree.runner.target import Target, plain_weight

STOCK_MODULES = ("torch.nn.", "transformers.")
OUTPUT_HOOKS = ("transformers.utils.output_capturing",)
COMPILED, TENSORS, CAPTURED, INDUCTOR = FORMS = ("cpu", "eager", "cuda_graphs", "inductor")
KEPT_STACKS = 32  # sets of layers that are remembered


class EagerRunner(Runner):
    """Drives models of the families in `parts` without their `forward`."""

    name = "eager"
    guard = torch.inference_mode  # a tenth faster; safe since no stock module runs that could keep a tensor

    @staticmethod
    def qualifies(target: Target) -> bool:
        """Whether the model is of a known shape and in its stock state.

        Adapters, quantised linears, offloading hooks or weights on several devices all say no.
        """
        if not known_shape(target) or type(target.model).__module__.split(".")[0] != "transformers":
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
        parameters = list(target.model.parameters())
        return all(map(plain_weight, parameters)) and len({p.device for p in parameters}) == 1

    @staticmethod
    def best_form(target: Target) -> str:
        """The fastest form for a model that qualifies."""
        fits = target.dtype == torch.float32 and target.device.type == "cpu"
        if fits and load_library() is not None and _copies(target, compiled=True):
            return COMPILED
        gains = target.device.type == "cuda" or may_pack(target.dtype, target.device)
        return CAPTURED if gains and not is_length_dependent(target.decoder.rotary_emb) else TENSORS

    def __init__(self, target: Target, form: str = "auto") -> None:
        if not self.qualifies(target):
            raise ValueError(
                f"This '{target.model_type}' model does not qualify for the eager runner (it drives stock "
                f"{', '.join(FAMILIES)} models without adapters, quantisation or offloading): "
                "use runner='hooked' or runner='auto'."
            )
        super().__init__(target)
        form = self.best_form(target) if form == "auto" else form
        # Asked every pass, and a look at the model's parameters takes a while; a model that is cast gets a new runner.
        self._dtype, self._device = target.dtype, target.device
        library = _library_for(target, form)
        quick = library is not None or (form == CAPTURED and may_pack(target.dtype, target.device))
        copy = _copies(target, compiled=quick)
        parts = [Parts.of(layer, target.config) for layer in target.layers]
        self._rotary = target.decoder.rotary_emb
        self._per_row = is_length_dependent(self._rotary)
        # Angles are the same in all layers, or differ by the layers' kind.
        types = {k.name for k in target.kinds} if isinstance(self._rotary.rope_type, dict) else {None}
        width = width_of(self._rotary, target.device, next(iter(types)))
        neighbours = target.model_type in TURN_NEIGHBOURS
        self._rotation = Rotation(width, parts[0].heads.dim, neighbours, target.device)
        self._tables = {name: RotaryTable(self._rotary, self._rotation, name) for name in types}
        self._compiled: CompiledStack | None = None  # where layers are compiled
        self._cap = parts[0].cap
        self._norm, head = Norm.of(target.decoder.norm), target.model.get_output_embeddings()
        self._layers: list[Any]
        self._head: Any
        cap = getattr(target.config, "final_logit_softcapping", None)
        if library is None or not copy:
            form = self._form_of(form)
            # Packed weights are for fixed shapes; other passes read the stock ones, so that there is one copy.
            packed = form == CAPTURED and copy and may_pack(target.dtype, target.device)
            self._layers = [TensorLayer(part, copy and not packed) for part in parts]
            self._head = TensorHead(self._norm, head, copy and not packed, cap)
        else:
            self.name, self.form = COMPILED, f"{COMPILED} {ABI}"
            self._layers = [CompiledLayer(library, part, self._rotation) for part in parts]
            self._head = CompiledHead(library, self._norm, head, cap)
            self._compiled = CompiledStack(library, self._layers)
        self._library = library
        self._embedding = target.model.get_input_embeddings()
        # By what is left out; what all layers make serves every pass that leaves out nothing.
        self._stacks: dict[Skip | None, _Stack] = {}
        self._whole = self._stack_without(None)
        self._kinds = tuple(set(target.kinds))
        chain = self._whole.chain
        self._at_once = None if chain is None else OneCall.beside(chain)
        self.packs = self._at_once is not None
        self._captured: CapturedPasses | None = None
        if form in (CAPTURED, INDUCTOR):
            fixed, fixed_head = self._layers, self._head
            if packed:
                fixed = [TensorLayer(part, copy, packed) for part in parts]
                fixed_head = TensorHead(self._norm, head, copy, cap, packed)
            if form == INDUCTOR:
                known: dict[Any, Any] = {}
                fixed = [InductorLayer(layer, known) for layer in fixed]
            self.name = self.form = form
            self._captured = CapturedPasses(self, fixed, fixed_head, capture_for(target.device))

    @property
    def plan_device(self) -> torch.device:
        """See `Runner.plan_device`."""
        return self.target.device if self._captured is None else torch.device("cpu")

    @property
    def captured_bytes(self) -> dict[str, int]:
        """Bytes on the device that captured passes hold, by what for; nothing in other forms."""
        return {} if self._captured is None else self._captured.nbytes

    def new_cache(
        self, slots: int, capacity: int = BLOCK, prefix: list[tuple[Tensor, Tensor]] | None = None
    ) -> SlotCache:
        """See `Runner.new_cache`."""
        if self._captured is None or prefix is not None:
            return super().new_cache(slots, capacity, prefix)
        return self._captured.shelf.lend(len(self._layers), slots, capacity)

    @in_own_type
    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """See `Runner.run`."""
        if self._at_once is not None and self._at_once.takes(plan):
            result = self._run_at_once(self._at_once, plan, cache, first)
            if result is not None:
                return result
        if self._captured is not None and self._captured.takes(plan):
            return self._captured.run(plan, cache, first)
        plan = plan.to(self._device)
        appended = sum(s.positions.shape[1] for s in plan.surgeries if s.positions is not None)
        cache.open(first, plan.batch, plan.width + appended)
        surgeries = {s.layer: s for s in plan.surgeries}
        segment = Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)
        segments, hidden = [segment], {}
        stack = self._stack_without(plan.skip)
        x = self._embedding(plan.tokens)
        if plan.embeddings is not None:
            x = torch.cat([x[:, : -plan.embeddings.shape[1]], plan.embeddings.to(x.dtype)], 1)
        rows = SegmentRows(self, segment, plan, cache, first, x)
        stops = sorted({*surgeries, *plan.taps, len(self._layers)} - {0})
        for i, stop in zip([0, *stops], stops, strict=False):
            if i in surgeries:
                segment, x = operate(segment, surgeries[i], x, plan.width)
                segments.append(segment)
                rows = SegmentRows(self, segment, plan, cache, first, x)
            if i in plan.taps:
                hidden[i] = x.clone()  # layers may add to x in place
            x = self._advance(x, stack, i, stop, rows) if plan.leaves is None else self._leave(x, stack, rows, plan)
        if len(self._layers) in plan.taps:
            hidden[len(self._layers)] = x
        return PassResult(self._head(x[:, logit_slice(plan, segment)]), segments, hidden, self)

    def _run_at_once(self, at_once: OneCall, plan: Plan, cache: SlotCache, first: int) -> PassResult | None:
        """The same in one call; None where a window cuts something off, or ids or positions are out of range."""
        rows = at_once.rows(plan)
        reach = max(cache.lengths[first : first + plan.batch]) + rows
        if any(limits(kind, reach) for kind in self._kinds):
            return None
        table = self._tables[None]
        table.reach(reach, self._dtype, self._device)
        cache.open(first, plan.batch, rows)
        brought = at_once.run(plan, cache, (table.cosines, table.sines))
        if brought is None:
            return None
        hidden = {} if brought.hidden is None else {len(self._layers): brought.hidden}
        return PassResult(brought.logits, brought.segments, hidden, self)

    def run_ahead(self, plan: AheadPlan, cache: SlotCache, first: int = 0, encoder: Any = None) -> Course | None:
        """See `Runner.run_ahead`."""
        reach = max(cache.lengths[first : first + plan.batch]) + plan.steps
        chain = self._stack_without(plan.skip).chain
        if chain is None or any(limits(kind, reach) for kind in self._kinds):
            return None
        table = self._tables[None]
        table.reach(max(plan.positions) + plan.steps, self._dtype, self._device)
        cache.open(first, plan.batch, plan.steps)
        return chain.run(plan, cache, (table.cosines, table.sines))

    @in_own_type
    @torch.inference_mode()
    def close(self, hidden: Tensor) -> Tensor:
        """See `Runner.close`."""
        return self._norm(hidden)

    @in_own_type
    @torch.inference_mode()
    def head(self, closed: Tensor) -> Tensor:
        """See `Runner.head`."""
        if isinstance(self._head, CompiledHead):
            return self._head.product(closed)
        return F.linear(closed, self.target.model.get_output_embeddings().weight)

    @in_own_type
    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Runner.logits`."""
        logits: Tensor = self._head(hidden)
        return logits

    @in_own_type
    @torch.inference_mode()
    def best(self, hidden: Tensor, rows: Sequence[Sequence[int]], count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Runner.best`."""
        if isinstance(self._head, CompiledHead) and hidden.is_contiguous():
            found = self._head.best(hidden, rows, count)
            if found is not None:
                return found
        return super().best(hidden, rows, count)

    def _form_of(self, form: str) -> str:
        """What layers in tensor operations are run in, for one form or for "auto".

        Raises:
            ValueError: fixed shapes are asked for, and the model cannot have them.
        """
        target = self.target
        if form == COMPILED:
            raise ValueError(
                "There is too little free memory for the copy of the weights that compiled layers read: call "
                "draftree.runner.pack_weights(model) first, or use runner='eager'."
            )
        if form != TENSORS and self._per_row:
            raise ValueError(
                "Passes of fixed shapes cannot be had for rotary embeddings that depend on a text's length "
                f"('{self._rotary.rope_type}'): leave out runner='cuda_graphs' or compile=True."
            )
        if form == INDUCTOR:
            check_compiler(target.device)
        return form

    def _stack_without(self, skip: Skip | None) -> _Stack:
        """The layers of a pass that leaves out `skip`; weights are shared."""
        found = self._stacks.get(skip)
        if found is None:
            if len(self._stacks) >= KEPT_STACKS:  # a search for what to leave out tries many
                self._stacks = {None: self._whole}
            found = self._stacks[skip] = self._made_without(skip or Skip())
        return found

    def _made_without(self, skip: Skip) -> _Stack:
        numbers = skip.kept(len(self._layers))
        layers = [self._layers[i].without(skip.at(i)) if skip.at(i) else self._layers[i] for i in numbers]
        compiled = chain = None
        if self._compiled is not None:
            assert self._library is not None
            compiled = CompiledStack(self._library, layers, numbers, self._compiled.pace)
            if not self._per_row and self._cap is None and None in self._tables:
                chain = chain_runner_of(self._library, compiled, self._head, self._embedding)
        return _Stack(numbers, layers, compiled, chain)

    def _advance(self, x: Tensor, stack: _Stack, first: int, last: int, rows: SegmentRows) -> Tensor:
        """The model's layers [first, last) on x [B, n, d], which may be changed, as far as they are in the stack."""
        numbers = stack.numbers
        of_stack = range(bisect_left(numbers, first), bisect_left(numbers, last))
        kinds = {i: self.target.kinds[numbers[i]] for i in of_stack}
        by_torch = {kind: self._cap is not None or rows.masks.limited(kind) for kind in set(kinds.values())}
        # Layers of one kind, or of several with the same angles, go through in one call where nothing hides columns.
        alike = {i: (by_torch[kind], self.angle_name(kind)) for i, kind in kinds.items()}
        for (torch_attends, _), group in groupby(of_stack, key=alike.__getitem__):
            layers = list(group)
            angles = rows.angles(kinds[layers[0]])
            if isinstance(angles, CompiledAngles) and not torch_attends:
                assert stack.compiled is not None
                stack.compiled.run(layers[0], layers[-1] + 1, x, angles)
                continue
            for i in layers:
                x = attend(stack.layers[i], x, numbers[i], rows, kinds[i], self._cap)
        return x

    def _leave(self, x: Tensor, stack: _Stack, rows: SegmentRows, plan: Plan) -> Tensor:
        """Layers on x [B, n, d] as long as the plan says, then keys and values alone."""
        assert plan.leaves is not None
        count = len(self._layers)
        for i in range(count):
            before = x.clone()  # layers may add to x in place
            x = self._advance(x, stack, i, i + 1, rows)
            if i + 1 < count and plan.leaves(i + 1, before, x):
                for later in range(i + 1, count):
                    self._layers[later].enter(x, rows.angles(self.target.kinds[later]), later)
                break
        return x

    def angles(
        self,
        segment: Segment,
        floor: tuple[int, ...],
        dtype: torch.dtype,
        cache: SlotCache,
        kind: LayerKind | None = None,
    ) -> Angles | CompiledAngles:
        """The angles of the segment's rows in layers of that kind, in the form that the layers take."""
        if self._per_row:
            angles = per_row_angles(self._rotary, segment.positions, floor, dtype)
            cosine, sine = self._rotation.spread(*angles)
        else:
            table = self._tables[None if kind is None else self.angle_name(kind)]
            cosine, sine = table.look(segment.positions, dtype)
        made = Angles(cosine[:, :, None], sine[:, :, None], cache, self._rotation)
        return made if self._compiled is None else CompiledAngles(made, segment, self._compiled)

    def angle_name(self, kind: LayerKind) -> str | None:
        """What tells the angles of layers of that kind from others; None where all are the same."""
        return None if None in self._tables else kind.name


def _copies(target: Target, *, compiled: bool) -> bool:
    """Whether the weights may be copied into a faster layout, or lie in it already."""
    packed = any(isinstance(module, PackedLinear) for module in target.model.modules())
    return packed or may_copy(target.model, target.device, compiled=compiled)


def _library_for(target: Target, form: str) -> ctypes.CDLL | None:
    """The C library where layers shall be compiled and can be.

    Raises:
        ValueError: they shall and cannot be.
    """
    fits = target.dtype == torch.float32 and target.device.type == "cpu"
    library = load_library() if fits and form == COMPILED else None
    if form == COMPILED and library is None:
        raise ValueError(
            "Compiled layers are for float32 on a CPU where the package was built with a C compiler: use "
            "runner='auto' for what this machine has."
        )
    return library


class _Stack(NamedTuple):
    """Layers that a pass goes through, all of them or some.

    Attributes:
        numbers: of the layers in the model, ascending; their cache columns go by them.
        layers: in that order.
        compiled: the same, where layers are compiled.
        chain: runs them ahead, where that can be.
    """

    numbers: Sequence[int]
    layers: list[Any]
    compiled: CompiledStack | None
    chain: ChainRunner | None
