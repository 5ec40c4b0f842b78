"""The hooked runner: any stock model through its own `forward`, with our cache, masks and positions.

A pass without surgery is a plain `forward` call. Only while a plan changes rows mid-stack (or a family needs
arguments that `forward` does not take) are hooks on the decoder layers. They act on the pass's own thread alone, and
are gone when the pass ends, however it ends. The layers' arguments are bound by signature, so no family's argument
order is known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftree.runner.base import Runner
from draftree.runner.hooked.anatomy import Anatomy, anatomy_of
from draftree.runner.hooked.bypass import Bypass, named_arguments
from draftree.runner.hooked.families import family_of
from draftree.runner.hooked.own_thread import lock_of, on_this_thread, replaced
from draftree.runner.hooked.row_by_row import RowByRow
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.gradient import GradientCache
from draftree.runner.layout.masks import PassMasks
from draftree.runner.layout.positions import is_length_dependent, per_row_angles
from draftree.runner.plan import PassResult, Plan, Segment, Surgery, logit_slice, operate
from draftree.runner.target import Target

MASK_ARGUMENTS = ("attention_mask", "causal_mask")


class HookedRunner(Runner):
    """Drives any decoder-only model, and the decoder of an encoder-decoder, through `forward`."""

    name = "hooked"
    copies = False

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.lock = lock_of(target.model)
        self.family = family_of(target)
        parameters = inspect.signature(type(target.model).forward).parameters
        self._takes_positions = "position_ids" in parameters and not target.encoder_decoder
        self._layer_signatures = [inspect.signature(type(layer).forward) for layer in target.layers]
        self._rotary = _outer_rotary_modules(target)
        self._length_dependent = any(is_length_dependent(m) for m in self._rotary)
        self._one_kind = len(set(target.kinds)) == 1
        self.bypass = Bypass(target, self._one_row)

    def _one_row(self) -> None:
        """Pass one row through the model, for those that watch."""
        target, encoder = self.target, None
        if target.encoder_decoder:
            encoder = self.new_encoder(1)
            encoder.admit(0, torch.zeros(2, dtype=torch.long, device=target.device))
        row = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
        one = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        self.run(Plan(one, one, row), self.new_cache(1), encoder=encoder)

    @torch.no_grad()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """See `Runner.run`."""
        return self._run(plan, cache, first, encoder)

    @torch.no_grad()
    def close(self, hidden: Tensor) -> Tensor:
        """See `Runner.close`."""
        return self._anatomy.close(hidden)

    @torch.no_grad()
    def head(self, closed: Tensor) -> Tensor:
        """See `Runner.head`."""
        return self._anatomy.head(closed)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Runner.logits`."""
        anatomy = self._anatomy
        return anatomy.finish(anatomy.head(anatomy.close(hidden)))

    @property
    def _anatomy(self) -> Anatomy:
        return anatomy_of(self)

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
        appended = sum(s.positions.shape[1] for s in plan.surgeries if s.positions is not None)
        rows = plan.width + appended
        with self.lock:  # whoever looks at the model meanwhile must not take a pass's hooks for the user's
            return self._through(plan, cache, first, encoder, rows)

    def _through(self, plan: Plan, cache: SlotCache, first: int, encoder: Any, rows: int) -> PassResult:
        cache.open(first, plan.batch, rows, bare=plan.bare)
        # Requests of equal length still differ where their prompts or trees do: only one alone has one set.
        if self.family.ragged_batches or plan.batch == 1:
            return _HookedPass(self, plan, cache, first, encoder).run()
        results = []
        for b in range(plan.batch):
            cache.open(first + b, 1, rows, bare=plan.bare)
            results.append(_HookedPass(self, plan.of(b), cache, first + b, encoder).run())
        cache.open(first, plan.batch, rows, bare=plan.bare)
        return PassResult.join(results)


def _outer_rotary_modules(target: Target) -> list[nn.Module]:
    inside = {id(m) for layer in target.layers for m in layer.modules()}
    modules = target.decoder.modules()
    return [m for m in modules if "rotary" in type(m).__name__.lower() and id(m) not in inside]


class _HookedPass:
    """One forward call and the hooks that live as long as it does."""

    def __init__(self, runner: HookedRunner, plan: Plan, cache: SlotCache, first: int, encoder: Any) -> None:
        self.runner, self.plan, self.cache, self.first, self.encoder = runner, plan, cache, first, encoder
        self.target = runner.target
        self.family = runner.family
        self.dtype = self.target.dtype
        self.surgeries = {s.layer: s for s in plan.surgeries}
        self.segments = [Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)]
        self.masks = PassMasks(self.segments[0], cache, first, self.dtype, plain_row=self._may_go_unmasked())
        self.hidden: dict[int, Tensor] = {}
        self.final: Tensor | None = None
        self.rotary_calls: list[tuple[nn.Module, Any, Any, Any]] = []
        self.rotary_again: dict[int, Any] = {}
        self.recomputing = False
        self.operating = False  # a surgery may run the model's head, which is not the end of the pass then

    # ---------------------------------------------------------------- the call

    def run(self) -> PassResult:
        plan, target = self.plan, self.target
        ids_name = "decoder_input_ids" if target.encoder_decoder else "input_ids"
        arguments: dict[str, Any] = {ids_name: plan.tokens, "use_cache": True}
        if target.encoder_decoder:
            arguments |= self.encoder.arguments(self.cache, self.first, plan.batch)
            arguments["decoder_attention_mask"] = self._forward_mask()
        else:
            arguments[target.cache_argument] = self.cache
            arguments["attention_mask"] = self._forward_mask()
        if self.runner._takes_positions:
            arguments["position_ids"] = plan.positions
        with ExitStack() as stack:
            if plan.skip is not None:
                stack.enter_context(self.runner.bypass.without(plan.skip))
            if plan.leaves is not None:
                stack.enter_context(self.runner.bypass.leaving(plan.leaves, self.cache))
            self._hook(stack)
            apart = RowByRow(lambda: self.masks, target, unmasked=self._may_go_unmasked()) if plan.row_by_row else None
            if apart is not None:
                stack.enter_context(apart)
            logits = target.model(**arguments).logits
            if apart is not None:
                self.runner.attends_apart = apart.calls >= len(target.layers)
        return PassResult(logits, self.segments, self.hidden, self.runner)

    def _forward_mask(self) -> Any:
        if self.family.layer_arguments_needed:
            return None  # some of these families take no 4D mask in `forward`; every layer gets its own
        if self.runner._one_kind:
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
        if self.runner._length_dependent or plan.surgeries:
            for module in self.runner._rotary:
                if is_length_dependent(module):
                    stack.enter_context(replaced(module, "forward", partial(self._own_angles, module)))
                self._add(stack, module.register_forward_hook, self._after_rotary, with_kwargs=True)
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
        stack.callback(register(on_this_thread(hook), **options).remove)

    def _replace_embeddings(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert self.plan.embeddings is not None
        count = self.plan.embeddings.shape[1]
        return torch.cat([output[:, :-count], self.plan.embeddings.to(output.dtype)], 1)

    def _after_rotary(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.recomputing:
            self.rotary_calls.append((module, args, kwargs, output))

    def _own_angles(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of a length-dependent module's `forward`, which would also remember the longest text."""
        return per_row_angles(module, self.segments[-1].positions, self.plan.rope_floor, x.dtype)

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
        hidden = args[0] if self.final is None else self.final
        # A head with a bias adds it after rounding where its input has gaps, and before where it has none.
        return (hidden[:, logit_slice(self.plan, self.segments[-1])].contiguous(),)

    def _before_layer(self, index: int, *, rewrite: bool) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            named = named_arguments(self.runner._layer_signatures[index], module, args, kwargs)
            first = next(iter(named))
            hidden = named[first]
            surgery = self.surgeries.get(index)
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
        self.masks = PassMasks(segment, self.cache, self.first, self.dtype)
        self.rotary_again = {}
        return hidden

    def _rewrite(self, index: int, named: dict[str, Any]) -> None:
        """Give the layer the positions, angles and mask of the rows it now gets."""
        segment = self.segments[-1]
        known = self.runner._layer_signatures[index].parameters
        if len(self.segments) > 1 and named.get("position_embeddings") is not None:
            named["position_embeddings"] = self._angles(named["position_embeddings"], next(iter(named.values())))
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
        """Call the rotary module that made `stock` again, for the present rows."""
        for module, args, kwargs, output in self.rotary_calls:
            same = output is stock or (isinstance(output, tuple) and isinstance(stock, tuple) and output[0] is stock[0])
            if not same:
                continue
            if id(output) not in self.rotary_again:
                positions = self.segments[-1].positions
                kwargs = {k: positions if k == "position_ids" else v for k, v in kwargs.items()}
                args = tuple(self._swap(a, positions, hidden) for a in args)
                self.recomputing = True
                try:
                    self.rotary_again[id(output)] = module(*args, **kwargs)
                finally:
                    self.recomputing = False
            return self.rotary_again[id(output)]
        raise RuntimeError(
            f"Cannot re-position rows inside {self.target.model_type}: its position embeddings come from no "
            "rotary module that draftree knows; please report this architecture."
        )

    @staticmethod
    def _swap(argument: Any, positions: Tensor, hidden: Tensor) -> Any:
        if not torch.is_tensor(argument):
            return argument
        return positions if argument.dtype == torch.long else hidden
