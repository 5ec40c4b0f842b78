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
from draftree.host.loop import LoopHost
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
_hosts: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, Host]]] = weakref.WeakKeyDictionary()
_opening = threading.RLock()


def open_host(model: Any, choice: str | Host = "auto") -> Host:
    """The host for `model`: "loop" (fast, llama-shaped models), "hooked" (any model), "auto", or one opened just now.

    A family that is not in the tests is looked at once: its tree logits must be those of its branches.

    Raises:
        TypeError, ValueError: a model that cannot be driven, or a choice that does not exist or fit.
    """
    if isinstance(choice, Host):
        return choice
    if choice not in ("auto", "loop", "hooked"):
        raise ValueError(f"host is {choice!r}: choose 'auto', 'loop' or 'hooked'.")
    if not isinstance(model, nn.Module):
        target = inspect_model(model)  # says what is wrong with it
        return _open(target, _resolved(choice, target))
    with _opening:
        known, held = _hosts.get(model, (None, {}))
        with lock_of(model):  # no pass of another thread may have its hooks on the model while it is looked at
            state = _state_of(model)
        if known == state and choice in held:
            return held[choice]
        target = inspect_model(model)
        if known != state:
            held = {}
            _hosts[model] = state, held
        name = _resolved(choice, target)
        if name not in held:
            held[name] = _open(target, name)
        held[choice] = held[name]
        return held[name]


def _resolved(choice: str, target: Target) -> str:
    """The name of a host, for one or for "auto"."""
    quick = LoopHost.qualifies(target) or CrossHost.qualifies(target)
    return choice if choice != "auto" else "loop" if quick else "hooked"


def _open(target: Target, name: str) -> Host:
    host: Host
    if name == "loop":
        host = CrossHost(target) if CrossHost.qualifies(target) else LoopHost(target)
    else:
        host = HookedHost(target)
    if target.model_type not in TESTED_FAMILIES:
        check_trees(host)
    return host


def _state_of(model: nn.Module) -> Any:
    """Whatever a host depends on: modules, hooks, where weights lie and their version, kind of attention.

    Moving or casting a model gives its parameters other memory, training gives them another version.
    """
    modules = list(model.modules())
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in modules if m._forward_hooks or m._forward_pre_hooks]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return (
        [(id(m), type(m)) for m in modules],
        [_place(p) for m in modules for p in m._parameters.values() if p is not None],
        [_place(m.panels) for m in modules if isinstance(m, PackedLinear)],
        [[id(hook) for hook in (*after.values(), *before.values())] for after, before in hooks],
        [id(m) for m in modules if "_hf_hook" in m.__dict__],
        attention,
    )


def _place(parameter: Tensor) -> tuple[int, int]:
    plain = type(parameter) in (nn.Parameter, Tensor)  # quantised ones have no single place in memory
    return parameter.data_ptr() if plain else id(parameter), parameter._version
