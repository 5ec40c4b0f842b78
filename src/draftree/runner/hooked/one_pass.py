"""One pass through a stock model's own `forward`, with our cache, masks and positions.

A pass without surgery is a plain `forward` call. Only while a plan changes rows mid-stack (or a family needs
arguments that `forward` does not take) are hooks on the decoder layers. They are
removed when the pass ends, also by an error. The layers' arguments are bound by signature, so no family's argument
order is known here.

A stock model makes the rotary angles of all its rows before its first layer and hands them to each. When rows leave or
join between two layers, its own rotary modules are called once more, for the rows that there are then.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftree.runner.hooked.families import Family, family_of, replaced
from draftree.runner.kv.cache import SlotCache
from draftree.runner.masks import PassMasks
from draftree.runner.plan import PassResult, Plan, Segment, Surgery
from draftree.runner.positions import is_length_dependent, per_row_angles
from draftree.runner.surgery import logit_slice, operate
from draftree.runner.target import Target, arguments_of

MASK_ARGUMENTS = ("attention_mask", "causal_mask")


@dataclass(frozen=True, slots=True)
class StockModel:
    """Facts of a model that hooks need.

    Attributes:
        target: its facts.
        family: what its family needs in addition to masks and positions.
        takes_positions: whether its `forward` takes position ids.
        layer_signatures: of the `forward` of each layer.
        rotary: rotary modules that lie in no layer.
    """

    target: Target
    family: Family
    takes_positions: bool
    layer_signatures: Sequence[inspect.Signature]
    rotary: Sequence[nn.Module]

    @classmethod
    def of(cls, target: Target) -> StockModel:
        """Read the facts of a model."""
        takes_positions = "position_ids" in arguments_of(type(target.model)) and not target.encoder_decoder
        signatures = [signature_of(layer) for layer in target.layers]
        return cls(target, family_of(target), takes_positions, signatures, outer_rotary_modules(target))

    @property
    def length_dependent(self) -> bool:
        """True if angles depend on the text's length."""
        return any(is_length_dependent(module) for module in self.rotary)


class HookedPass:
    """One forward call and the hooks that live as long as it does.

    Args:
        stock: the model.
        plan, cache, first, encoder: as of `Runner.run`.
    """

    def __init__(self, stock: StockModel, plan: Plan, cache: SlotCache, first: int, encoder: Any) -> None:
        self.stock, self.plan, self.cache, self.first, self.encoder = stock, plan, cache, first, encoder
        self.segments = [Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)]
        self.masks = PassMasks(self.segments[0], cache, first, self.target.dtype, plain_row=self._may_go_unmasked())
        self.hidden: dict[int, Tensor] = {}
        self.final: Tensor | None = None
        self.rotary = RotaryCalls()
        self.operating = False  # a surgery may run the model's head, which is not the end of the pass then
        self.cut = False  # whether the head got no more rows than there are logits for

    @property
    def target(self) -> Target:
        """The model's facts."""
        return self.stock.target

    @property
    def family(self) -> Family:
        """The family's needs beyond masks and positions."""
        return self.stock.family

    # ---------------------------------------------------------------- the call

    def run(self) -> PassResult:
        """Pass the rows through the model."""
        plan, target = self.plan, self.target
        ids_name = "decoder_input_ids" if target.encoder_decoder else "input_ids"
        arguments: dict[str, Any] = {ids_name: plan.tokens, "use_cache": True, "return_dict": True}
        if target.encoder_decoder:
            arguments |= self.encoder.arguments(self.cache, self.first, plan.batch)
            arguments["decoder_attention_mask"] = self._forward_mask()
        else:
            arguments[target.cache_argument] = self.cache
            arguments["attention_mask"] = self._forward_mask()
        if self.stock.takes_positions:
            arguments["position_ids"] = plan.positions
        with ExitStack() as stack:
            self._hook(stack)
            logits = target.model(**arguments).logits
        if not self.cut:  # the model multiplies by the head's weight itself
            logits = logits[:, logit_slice(plan, self.segments[-1])]
        return PassResult(logits, self.segments, self.hidden)

    def _forward_mask(self) -> Any:
        if self.family.layer_arguments_needed:
            return None  # some of these families take no 4D mask in `forward`; every layer gets its own
        if len(set(self.target.kinds)) == 1:
            return self.masks.additive(self.target.kinds[0])
        return {kind.name: self.masks.additive(kind) for kind in set(self.target.kinds)}

    def _may_go_unmasked(self) -> bool:
        """One row that sees everything needs no mask; then `forward` takes its own quick way, as in plain decoding."""
        return not self.target.encoder_decoder and not self.family.layer_arguments_needed

    # ---------------------------------------------------------------- hooks

    def _hook(self, stack: ExitStack) -> None:
        plan, target = self.plan, self.target
        stack.enter_context(self.family.patched(lambda: self.masks))
        if plan.embeddings is not None:
            module = target.decoder.get_input_embeddings() or target.model.get_input_embeddings()
            self._add(stack, module.register_forward_hook, self._replace_embeddings)
        if self.stock.length_dependent or plan.surgeries:
            for module in self.stock.rotary:
                if is_length_dependent(module):
                    stack.enter_context(replaced(module, "forward", partial(self._own_angles, module)))
                self._add(stack, module.register_forward_hook, self.rotary.note, with_kwargs=True)
        needed = range(len(target.layers))
        if not self.family.layer_arguments_needed:
            start = min((s.layer for s in plan.surgeries), default=len(target.layers))
            needed = range(start, len(target.layers))
        for i, layer in enumerate(target.layers):
            if i in needed or i in plan.taps:
                hook = self._before_layer(i, rewrite=i in needed)
                self._add(stack, layer.register_forward_pre_hook, hook, with_kwargs=True)
        if len(target.layers) in plan.taps:
            self._add(stack, target.layers[-1].register_forward_hook, self._tap_last)
        if self.family.views_final_rows and plan.surgeries:
            self._add(stack, target.decoder.ln_f.register_forward_hook, self._view_final)
        head = target.model.get_output_embeddings()
        self._add(stack, head.register_forward_pre_hook, self._before_head)

    @staticmethod
    def _add(stack: ExitStack, register: Any, hook: Any, **options: Any) -> None:
        stack.callback(register(hook, **options).remove)

    def _replace_embeddings(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert self.plan.embeddings is not None
        own = self.plan.embeddings.to(output.dtype)
        # Under autocast in bfloat16, torch.cat refuses tensors of float16.
        return output.slice_scatter(own, 1, output.shape[1] - own.shape[1])

    def _own_angles(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of a length-dependent module's `forward`, which would also remember the longest text."""
        layer_type = kwargs.get("layer_type", args[1] if len(args) > 1 else None)
        return per_row_angles(module, x, self.segments[-1].positions, self.plan.prompt_lengths, layer_type)

    def _tap_last(self, module: nn.Module, args: Any, output: Any) -> None:
        self.hidden[len(self.target.layers)] = output[0] if isinstance(output, tuple) else output

    def _view_final(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.final = output
        width = self.plan.width
        if output.shape[1] >= width:
            return output[:, :width]
        return torch.nn.functional.pad(output, (0, 0, 0, width - output.shape[1]))

    def _before_head(self, module: nn.Module, args: Any) -> Any:
        if self.operating:
            return None
        self.cut = True
        hidden = args[0] if self.final is None else self.final
        # A head with a bias adds it after rounding where its input has gaps, and before where it has none.
        return (hidden[:, logit_slice(self.plan, self.segments[-1])].contiguous(),)

    def _before_layer(self, index: int, *, rewrite: bool) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            named = named_arguments(self.stock.layer_signatures[index], module, args, kwargs)
            first = next(iter(named))
            hidden = named[first]
            surgery = next((s for s in self.plan.surgeries if s.layer == index), None)
            if surgery is not None:
                hidden = self._operate(surgery, hidden)
            if index in self.plan.taps:
                self.hidden[index] = hidden
            if not rewrite:
                return None
            named[first] = hidden
            self._rewrite(index, named)
            return (named.pop(first),), named

        return hook

    def _operate(self, surgery: Surgery, hidden: Tensor) -> Tensor:
        self.operating = True
        try:
            segment, hidden = operate(self.segments[-1], surgery, hidden, self.plan.width)
        finally:
            self.operating = False
        self.segments.append(segment)
        self.masks = PassMasks(segment, self.cache, self.first, self.target.dtype)
        self.rotary.rows_changed()
        return hidden

    def _rewrite(self, index: int, named: dict[str, Any]) -> None:
        """Give the layer the positions, angles and mask of the rows it now gets."""
        segment = self.segments[-1]
        known = self.stock.layer_signatures[index].parameters
        if len(self.segments) > 1 and named.get("position_embeddings") is not None:
            hidden = next(iter(named.values()))
            named["position_embeddings"] = self._angles(named["position_embeddings"], hidden)
        if "position_ids" in named:
            named["position_ids"] = segment.positions
        kind = self.target.kinds[index]
        mask = self.masks.additive(kind)
        for name in MASK_ARGUMENTS:
            if name in named or name in known:
                named[name] = mask
        cross = named.get("encoder_attention_mask")
        if cross is not None:  # the same for every row, but spelt out for the entering ones
            named["encoder_attention_mask"] = cross[:, :, :1].expand(-1, -1, segment.positions.shape[1], -1)
        named |= self.family.layer_arguments(index, kind, self.masks)

    def _angles(self, stock: Any, hidden: Tensor) -> Any:
        """The angles of the present rows, in place of `stock`."""
        angles = self.rotary.repeated(stock, self.segments[-1].positions, hidden)
        if angles is None:
            raise RuntimeError(
                f"Cannot re-position rows inside {self.target.model_type}: its position embeddings come from no "
                "rotary module that draftree knows; please report this architecture."
            )
        return angles


class _Call(NamedTuple):
    """A call of a rotary module in this pass, and what it returned."""

    module: nn.Module
    args: Any
    kwargs: dict[str, Any]
    output: Any


class RotaryCalls:
    """The calls of a model's rotary modules in one pass, to be repeated for other rows."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._again: dict[int, Any] = {}
        self._repeating = False

    def note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook of rotary modules."""
        if not self._repeating:
            self._calls.append(_Call(module, args, kwargs, output))

    def rows_changed(self) -> None:
        """Forget the angles of earlier rows."""
        self._again = {}

    def repeated(self, stock: Any, positions: Tensor, hidden: Tensor) -> Any:
        """Repeat the call that made `stock` for rows at `positions` [B, n] with states [B, n, d].

        Returns None if no rotary module made it.
        """
        call = next((call for call in self._calls if _made(stock, call.output)), None)
        if call is None:
            return None
        if id(call.output) not in self._again:
            kwargs = {k: positions if k == "position_ids" else v for k, v in call.kwargs.items()}
            args = [_swapped(a, positions, hidden) for a in call.args]
            self._repeating = True
            try:
                self._again[id(call.output)] = call.module(*args, **kwargs)
            finally:
                self._repeating = False
        return self._again[id(call.output)]


def _made(stock: Any, output: Any) -> bool:
    """Return whether these are the same angles, or tuples that begin with the same."""
    return output is stock or (isinstance(output, tuple) and isinstance(stock, tuple) and output[0] is stock[0])


def _swapped(argument: Any, positions: Tensor, hidden: Tensor) -> Any:
    """Positions and states in place of those of the earlier rows, on their device, which need not be this layer's."""
    if not torch.is_tensor(argument):
        return argument
    return (positions if argument.dtype == torch.long else hidden).to(argument.device)


def outer_rotary_modules(target: Target) -> Sequence[nn.Module]:
    """Rotary modules of the decoder that lie in no layer."""
    inside = {id(m) for layer in target.layers for m in layer.modules()}
    modules = target.decoder.modules()
    return [m for m in modules if "rotary" in type(m).__name__.lower() and id(m) not in inside]


def signature_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's `forward`, or of the first inner one that names its arguments."""
    for part in module.modules():
        signature = inspect.signature(type(part).forward)
        if sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values()) > 1:  # `self` is one
            return signature
    return inspect.signature(type(module).forward)


def named_arguments(
    signature: inspect.Signature, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of a call of `module.forward` by name, in the signature's order; those not given are left out."""
    named = dict(signature.bind(module, *args, **kwargs).arguments)
    named.pop("self")
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named
