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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftree.runner.hooked.families import family_of
from draftree.runner.images import own_positions
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import PassResult, Plan, Segment, Surgery, logit_slice, operate
from draftree.runner.positions import LayerKind, PassMasks, is_length_dependent, per_row_angles
from draftree.runner.recurrent.cache import RecurrentCache
from draftree.runner.recurrent.operators import replaced
from draftree.runner.target import Target, arguments_of

MASK_ARGUMENTS = ("attention_mask", "causal_mask")


class StockModel:
    """Facts of a model that its hooked passes need.

    Attributes:
        family: its needs in addition to masks and positions.
        takes_positions: whether its `forward` takes position ids.
        signatures: of the `forward` of each layer.
        rotary: rotary modules of the decoder that lie in no layer.
        length_dependent: whether their angles depend on the text's length.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.family = target, family_of(target)
        self.takes_positions = "position_ids" in arguments_of(type(target.model)) and not target.encoder_decoder
        self.signatures = [signature_of(layer) for layer in target.layers]
        inside = {id(m) for layer in target.layers for m in layer.modules()}
        modules = target.decoder.modules()
        self.rotary = [m for m in modules if "rotary" in type(m).__name__.lower() and id(m) not in inside]
        self.length_dependent = any(is_length_dependent(module) for module in self.rotary)


class HookedPass:
    """One forward call and the hooks that live as long as it does."""

    def __init__(self, stock: StockModel, plan: Plan, cache: SlotCache, first: int, encoder: Any) -> None:
        self.stock, self.plan, self.cache, self.first, self.encoder = stock, plan, cache, first, encoder
        self.segments = [Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)]
        self.masks = PassMasks(self.segments[0], cache, first, self.target.dtype, plain_row=self._unmasked)
        self.hidden: dict[int, Tensor] = {}
        self.final: Tensor | None = None
        self.rotary_calls: list[RotaryCall] = []
        self.operating = False  # a surgery may run the model's head, which is not the end of the pass then
        self.cut = False  # whether the head got no more rows than there are logits for

    @property
    def target(self) -> Target:
        """The model's facts."""
        return self.stock.target

    @property
    def _unmasked(self) -> bool:
        """True if `forward` takes its own quick way for one row that sees everything, as in plain decoding."""
        return not self.target.encoder_decoder and not self.stock.family.layer_arguments_needed

    # ---------------------------------------------------------------- the call

    def run(self) -> PassResult:
        """Pass the rows through the model."""
        plan, target = self.plan, self.target
        ids_name = "decoder_input_ids" if target.encoder_decoder else "input_ids"
        arguments: dict[str, Any] = {ids_name: plan.tokens, "return_dict": True, "use_cache": True}
        if target.encoder_decoder:
            arguments |= self.encoder.arguments(self.cache, self.first, plan.batch)
            arguments["decoder_attention_mask"] = self._forward_mask()
        else:
            arguments[target.cache_argument] = self.cache
            arguments["attention_mask"] = self._forward_mask()
        if self.stock.takes_positions:
            arguments["position_ids"] = plan.angle_positions(plan.positions)
        if plan.images is not None:
            if not target.both_ways:  # PaliGemma's own positions begin at 1.
                del arguments["position_ids"]
            arguments |= {"attention_mask": torch.ones_like(plan.tokens), **plan.images}
        with ExitStack() as stack:
            shift = stack.enter_context(own_positions(target.model)) if plan.images is not None else int
            self._hook(stack)
            logits = target.model(**arguments).logits
            moved = shift()
        if not self.cut:  # the model multiplies by the head's weight itself
            logits = logits[:, logit_slice(plan, self.segments[-1])]
        return PassResult(logits, self.segments, self.hidden, shift=moved)

    def _forward_mask(self) -> Any:
        if self.target.recurrence is not None:
            mask = self.masks.additive(LayerKind())
            return {"full_attention": mask, "linear_attention": None, "conv": None} if self._attends else None
        if self.stock.family.layer_arguments_needed:
            return None  # some of these families take no 4D mask in `forward`; every layer gets its own
        if len(set(self.target.kinds)) == 1:
            return self.masks.additive(self.target.kinds[0])
        return {kind.name: self.masks.additive(kind) for kind in set(self.target.kinds)}

    @property
    def _attends(self) -> bool:
        """True if any layer of a model with recurrent layers attends."""
        return any(kind.name != "linear_attention" for kind in self.target.kinds)

    # ---------------------------------------------------------------- hooks

    def _hook(self, stack: ExitStack) -> None:
        plan, target = self.plan, self.target
        if isinstance(self.cache, RecurrentCache):
            stack.enter_context(self.cache.begin(plan, self.segments))
        stack.enter_context(self.stock.family.patched(lambda: self.masks))
        if plan.embeddings is not None:
            module = target.decoder.get_input_embeddings() or target.model.get_input_embeddings()
            self._add(stack, module.register_forward_hook, self._replace_embeddings)
        if self.stock.length_dependent or plan.surgeries:
            for module in self.stock.rotary:
                if is_length_dependent(module):
                    stack.enter_context(replaced(module, "forward", partial(self._own_angles, module)))
                self._add(stack, module.register_forward_hook, self._note_angles, with_kwargs=True)
        count = len(target.layers)
        start = 0 if self.stock.family.layer_arguments_needed else min((s.layer for s in plan.surgeries), default=count)
        for i, layer in enumerate(target.layers):
            if i >= start or i in plan.taps:
                hook = self._before_layer(i, rewrite=i >= start)
                self._add(stack, layer.register_forward_pre_hook, hook, with_kwargs=True)
        if count in plan.taps:
            self._add(stack, target.layers[-1].register_forward_hook, self._tap_last)
        if self.stock.family.views_final_rows and plan.surgeries:
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
        """Replace a length-dependent module's `forward`, which would also remember the longest text."""
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
            named = named_arguments(self.stock.signatures[index], module, args, kwargs)
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
        for call in self.rotary_calls:
            call.again = None
        return hidden

    def _rewrite(self, index: int, named: dict[str, Any]) -> None:
        """Give the layer the positions, angles and mask of the rows it now gets."""
        segment = self.segments[-1]
        known = self.stock.signatures[index].parameters
        if len(self.segments) > 1 and named.get("position_embeddings") is not None:
            hidden = next(iter(named.values()))
            named["position_embeddings"] = self._angles(named["position_embeddings"], hidden)
        if "position_ids" in named:
            named["position_ids"] = self.plan.angle_positions(segment.positions)
        kind = self.target.kinds[index]
        mask = self.masks.additive(kind)
        for name in MASK_ARGUMENTS:
            recurrent = self.target.recurrence is not None and named.get(name) is None
            if (name in named or name in known) and not recurrent:
                named[name] = mask
        cross = named.get("encoder_attention_mask")
        if cross is not None:  # the same for every row, but spelt out for the entering ones
            named["encoder_attention_mask"] = cross[:, :, :1].expand(-1, -1, segment.positions.shape[1], -1)
        named |= self.stock.family.layer_arguments(index, kind, self.masks)

    def _note_angles(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.rotary_calls.append(RotaryCall(module, args, kwargs, output))

    def _angles(self, entering: Any, hidden: Tensor) -> Any:
        """Repeat the rotary call that made the angles `entering`, for the present rows with states [B, n, d]."""
        call = next((call for call in self.rotary_calls if call.made(entering)), None)
        if call is None:
            raise RuntimeError(
                f"Cannot re-position rows inside {self.target.model_type}: its position embeddings come from no "
                "rotary module that draftree knows; please report this architecture."
            )
        if call.again is None:
            call.again = call.repeated(self.plan.angle_positions(self.segments[-1].positions), hidden)
        return call.again


@dataclass(slots=True)
class RotaryCall:
    """A call of a rotary module in this pass, what it returned, and `again` the angles of the present rows."""

    module: Any
    args: Any
    kwargs: dict[str, Any]
    output: Any
    again: Any = None

    def made(self, angles: Any) -> bool:
        """Return whether these are the call's angles, or a tuple that begins with the same."""
        both = isinstance(self.output, tuple) and isinstance(angles, tuple)
        return self.output is angles or (both and self.output[0] is angles[0])

    def repeated(self, positions: Tensor, hidden: Tensor) -> Any:
        """Return the angles of other rows, without the hooks of the module."""

        def swapped(argument: Any) -> Any:
            if not torch.is_tensor(argument):
                return argument
            return (positions if argument.dtype == torch.long else hidden).to(argument.device)

        kwargs = {name: swapped(value) if name == "position_ids" else value for name, value in self.kwargs.items()}
        return self.module.forward(*map(swapped, self.args), **kwargs)


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
    """Return the arguments given to `module.forward` by name, in the signature's order."""
    named = dict(signature.bind(module, *args, **kwargs).arguments)
    named.pop("self")
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named
