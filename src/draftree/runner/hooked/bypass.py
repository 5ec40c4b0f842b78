"""Parts of stock layers left out of a pass: their `forward` is replaced for as long as the pass lasts.

A module that is left out must still return what its caller unpacks: a tensor, or a tuple with one in front. That form
is not in any configuration, so one row is passed through the model and watched, as in `anatomy`. What a module adds to
the stream is either all it returns (then it returns nothing but zeros) or already added inside (then what came in).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftree.runner.hooked.families import replaced
from draftree.runner.kv.cache import SlotCache
from draftree.runner.layout.skip import Omitted, Skip
from draftree.runner.target import Target, offloaded

ATTENTIONS = ("self_attn", "self_attention", "attn", "attention")
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
MLP_LINEARS = ("fc1", "fc2")  # of layers whose MLP is no module of its own
WITHOUT_POSITIONS = ("t5", "mt5", "umt5")  # keys that depend on nothing but their state
STREAM = "residual"  # an argument that a module adds to what it returns

Pass = Callable[[], Any]  # one row through the model
Leaves = Callable[[int, Tensor, Tensor], bool]  # as of `Plan.leaves`


@dataclass(frozen=True, slots=True)
class _Form:
    """What a module returns.

    Attributes:
        signature: of its `forward`.
        first: the argument that is the stream, or the normed stream.
        rest: None for a bare tensor; else, for each further entry of the tuple, the argument that it repeats or None.
    """

    signature: inspect.Signature
    first: str
    rest: tuple[str | None, ...] | None

    def stand_in(self, module: nn.Module, *, zeros: bool) -> Callable[..., Any]:
        """What takes the place of the module's `forward`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = named_arguments(self.signature, module, args, kwargs)
            output = given.get(STREAM)
            if output is None:
                output = torch.zeros_like(given[self.first]) if zeros else given[self.first]
            if self.rest is None:
                return output
            return (output, *(None if name is None else given.get(name) for name in self.rest))

        return forward


class Bypass:
    """Leaves parts of a model's layers out.

    Args:
        target: the model.
        one_row: passes a single row through the model, to be watched.
    """

    def __init__(self, target: Target, one_row: Pass) -> None:
        self._target, self._one_row = target, one_row
        self._stands: dict[tuple[int, Omitted], list[tuple[nn.Module, Callable[..., Any]]]] = {}

    @contextmanager
    def without(self, skip: Skip) -> Iterator[None]:
        """The model does without `skip` inside this context.

        Raises:
            ValueError: a layer in which the part to leave out is not found.
        """
        layers = [(i, skip.at(i)) for i in range(len(self._target.layers)) if skip.at(i)]
        self._watch(layers)
        with ExitStack() as stack:
            for at in layers:
                for module, forward in self._stands[at]:
                    stack.enter_context(replaced(module, "forward", forward))
            yield

    @contextmanager
    def leaving(self, leaves: Leaves, cache: SlotCache) -> Iterator[None]:
        """Layers make only keys and values once `leaves`, called behind each, has returned True; see `Plan.leaves`.

        Raises:
            ValueError: a family whose keys and values draftree cannot make without its layers.
        """
        layers = self._target.layers
        keys_and_values = keys_and_values_of(self._target)
        whole = [(i, Omitted.ATTENTION | Omitted.MLP) for i in range(len(layers))]
        self._watch(whole)
        left = False

        def gate(number: int, layer: nn.Module, stand_in: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                output = (stand_in if left else partial(type(layer).forward, layer))(*args, **kwargs)
                hidden = output[0] if isinstance(output, tuple) else output
                if left:
                    cache.update(*keys_and_values(layer, hidden), number)
                elif number + 1 < len(layers):
                    left = leaves(number + 1, args[0], hidden)
                return output

            return forward

        with ExitStack() as stack:
            for i, layer in enumerate(layers):
                ((_, stand_in),) = self._stands[whole[i]]
                stack.enter_context(replaced(layer, "forward", gate(i, layer, stand_in)))
            yield

    def _watch(self, places: list[tuple[int, Omitted]]) -> None:
        """Find stand-ins for what is left out of these layers, where they are not known yet."""
        parts = {at: omitted_modules(self._target.layers[at[0]], at[1]) for at in places if at not in self._stands}
        if not parts:
            return
        forms: dict[nn.Module, _Form] = {}

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            signature = signature_of(module)
            given = named_arguments(signature, module, args, kwargs)
            first = next(name for name, value in given.items() if isinstance(value, Tensor))
            rest = None
            if isinstance(output, tuple):
                repeats = {id(value): name for name, value in given.items() if isinstance(value, Tensor)}
                rest = tuple(repeats.get(id(entry)) for entry in output[1:])
            forms[module] = _Form(signature, first, rest)

        with ExitStack() as stack:
            for module in {module for found in parts.values() for module, _ in found}:
                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            self._one_row()
        for at, found in parts.items():
            self._stands[at] = [(module, forms[module].stand_in(module, zeros=zeros)) for module, zeros in found]


def omitted_modules(layer: nn.Module, omitted: Omitted) -> list[tuple[nn.Module, bool]]:
    """The modules to replace where `layer` leaves `omitted` out, and whether zeros take the place of each one's output.

    Raises:
        ValueError: they are not found.
    """
    if omitted == Omitted.ATTENTION | Omitted.MLP:
        return [(layer, False)]
    steps = getattr(layer, "layer", None)
    if isinstance(steps, nn.ModuleList):  # T5: norm, part and sum are one module
        return [(steps[0] if omitted is Omitted.ATTENTION else steps[-1], False)]
    for name in ATTENTIONS if omitted is Omitted.ATTENTION else MLPS:
        module = getattr(layer, name, None)
        if isinstance(module, nn.Module):
            return [(module, True)]
    first, second = (getattr(layer, name, None) for name in MLP_LINEARS)
    if omitted is Omitted.MLP and isinstance(first, nn.Module) and isinstance(second, nn.Module):
        return [(first, False), (second, True)]
    part = "attention" if omitted is Omitted.ATTENTION else "MLP"
    raise ValueError(
        f"draftree finds no {part} to leave out in a {type(layer).__name__}: "
        "leave out whole layers (the same numbers in skip_attention and skip_mlp), or give exit_layer."
    )


def keys_and_values_of(target: Target) -> Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]:
    """What makes a layer's keys and values [B, heads, n, dim] of hidden states [B, n, d], without running it.

    Raises:
        ValueError: a family for which that is not known, or a model that does not lie on one device.
    """
    if target.model_type not in WITHOUT_POSITIONS:
        raise ValueError(
            f"Rows of a '{target.model_type}' model cannot leave it early: LossyCALM takes llama-shaped models (those "
            f"that run without their own forward), and {', '.join(WITHOUT_POSITIONS)}."
        )
    if offloaded(target.model):
        raise ValueError(
            "Rows cannot leave a model early whose layers accelerate spreads over several devices or keeps elsewhere: "
            "load it on one device (without device_map), or leave LossyCALM out."
        )

    def make(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        step = layer.layer[0]
        attention, normed = step.SelfAttention, step.layer_norm(hidden)
        shape = (*hidden.shape[:2], -1, attention.key_value_proj_dim)
        return attention.k(normed).view(shape).transpose(1, 2), attention.v(normed).view(shape).transpose(1, 2)

    return make


def signature_of(module: nn.Module) -> inspect.Signature:
    """Of a module's `forward`; of one that hands on whatever it is given, such as steering puts around a layer, that
    of the first module in it which names its arguments.
    """
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
