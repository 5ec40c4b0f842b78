"""Hosts: how rows of tokens get through a stock model."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor, nn

from draftree.host.base import Host
from draftree.host.check import check_trees
from draftree.host.crossed import CrossHost
from draftree.host.families import TESTED_FAMILIES
from draftree.host.hooked import HookedHost, lock_of
from draftree.host.loop import CAPTURED, COMPILED, INDUCTOR, TENSORS, LoopHost
from draftree.host.packing import pack_weights, unpack_weights
from draftree.host.panels import PackedLinear
from draftree.host.target import Target, inspect_model

__all__ = [
    "CrossHost",
    "HookedHost",
    "Host",
    "LoopHost",
    "Target",
    "inspect_model",
    "open_host",
    "pack_weights",
    "unpack_weights",
]

# Building a host inspects and may fuse weights, so one serves all engines on a model for as long as the model stays as
# it is; it holds no request's state, and the model only weakly, so an entry goes with its model.
_hosts: weakref.WeakKeyDictionary[Any, tuple[Any, dict[tuple[str, str], Host]]] = weakref.WeakKeyDictionary()
_opening = threading.RLock()


def open_host(model: Any, choice: str | Host = "auto", *, form: str = "auto", compile: bool = False) -> Host:
    """The host for `model`: "loop" (fast, llama-shaped models), "hooked" (any model), "auto", or one opened just now.

    A family that is not in the tests is looked at once: its tree logits must be those of its branches.

    Args:
        model: a Hugging Face model.
        choice: of the host.
        form: of the loop host's passes: "compiled" (in C; float32 on a CPU), "tensors", "captured" (fixed shapes, and
            CUDA graphs where the model is on such a device), or "auto": compiled where it can be, captured on CUDA,
            else tensors.
        compile: fixed shapes compiled by torch's inductor, each when it is first used, which takes a while.

    Raises:
        TypeError, ValueError: a model that cannot be driven, or a choice that does not exist or fit.
    """
    if isinstance(choice, Host):
        if compile or form != "auto":
            raise ValueError("This host has been opened already: give `form` and `compile` where it is opened.")
        return choice
    if choice not in ("auto", "loop", "hooked"):
        raise ValueError(f"host is {choice!r}: choose 'auto', 'loop' or 'hooked'.")
    if form not in ("auto", COMPILED, TENSORS, CAPTURED):
        raise ValueError(f"form is {form!r}: choose 'auto', '{COMPILED}', '{TENSORS}' or '{CAPTURED}'.")
    if compile:
        if form not in ("auto", CAPTURED):
            raise ValueError(f"compile=True has a form of its own: leave out form={form!r}, or compile.")
        form = INDUCTOR
    if not isinstance(model, nn.Module):
        target = inspect_model(model)  # says what is wrong with it
        return _open(target, _resolved(choice, target, form), form)
    with _opening:
        known, held = _hosts.get(model, (None, {}))
        with lock_of(model):  # no pass of another thread may have its hooks on the model while it is looked at
            state = _state_of(model)
        if known == state and (choice, form) in held:
            return held[choice, form]
        target = inspect_model(model)
        if known != state:
            held = {}
            _hosts[model] = state, held
        name = _resolved(choice, target, form)
        if (name, form) not in held:
            held[name, form] = _open(target, name, form)
        held[choice, form] = held[name, form]
        return held[name, form]


def _resolved(choice: str, target: Target, form: str) -> str:
    """The name of a host, for one or for "auto".

    Raises:
        ValueError: a form of the loop host is asked for, and that is not the host.
    """
    quick = LoopHost.qualifies(target) or CrossHost.qualifies(target)
    name = choice if choice != "auto" else "loop" if quick else "hooked"
    if form != "auto" and (name == "hooked" or CrossHost.qualifies(target)):
        asked = "compile=True" if form == INDUCTOR else f"form={form!r}"
        raise ValueError(
            f"{asked} is for models that the loop host drives in tensors, and this '{target.model_type}' model is "
            "driven otherwise: leave it out."
        )
    return name


def _open(target: Target, name: str, form: str) -> Host:
    host: Host
    if name == "loop":
        host = CrossHost(target) if CrossHost.qualifies(target) else LoopHost(target, form)
    else:
        host = HookedHost(target)
    if target.model_type not in TESTED_FAMILIES:
        check_trees(host)
    return host


def _state_of(model: nn.Module) -> list[Any]:
    """Whatever a host depends on: modules, hooks, where weights lie and their version, kind of attention.

    Moving or casting a model gives its parameters other memory, training gives them another version. One flat list:
    this is asked before every text, and with a tuple for each part Python's collector took five times as long as the
    rest.
    """
    state: list[Any] = [getattr(getattr(model, "config", None), "_attn_implementation", None)]
    for module in _modules(model):
        state.append(id(module))
        state.append(type(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                _add_place(parameter, state)
        if isinstance(module, PackedLinear):
            _add_place(module.panels, state)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                state += map(id, hooks.values())
        if "_hf_hook" in module.__dict__:
            state.append("_hf_hook")
    return state


def _modules(model: nn.Module) -> list[nn.Module]:
    """Every module once. `Module.modules` takes five times as long, and this is asked before every text."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += module._modules.values()
    return list(found.values())


def _add_place(parameter: Tensor, to: list[Any]) -> None:
    plain = type(parameter) in (nn.Parameter, Tensor)  # quantised ones have no single place in memory
    to.append(parameter.data_ptr() if plain else id(parameter))
    to.append(0 if parameter.is_inference() else parameter._version)  # made in inference mode, they count no changes
