"""Hosts: how rows of tokens get through a stock model."""

from __future__ import annotations

import weakref
from typing import Any

from draftree.host.base import Host
from draftree.host.check import check_trees
from draftree.host.families import TESTED_FAMILIES
from draftree.host.hooked import HookedHost
from draftree.host.loop import LoopHost
from draftree.host.target import Target, inspect_model

__all__ = ["HookedHost", "Host", "LoopHost", "Target", "inspect_model", "open_host"]

# Building a host inspects and may fuse weights, so one serves all engines on a model; it holds no request's
# state, and the model only weakly, so an entry goes with its model.
_hosts: weakref.WeakKeyDictionary[Any, dict[str, Host]] = weakref.WeakKeyDictionary()


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
    target = inspect_model(model)
    qualifies = choice != "hooked" and LoopHost.qualifies(target)
    if choice == "auto":
        choice = "loop" if qualifies else "hooked"
    held = _hosts.setdefault(model, {})
    host = held.get(choice)
    if isinstance(host, LoopHost) and not (qualifies and host.fresh):
        host = None
    if host is None:
        host = LoopHost(target) if choice == "loop" else HookedHost(target)
        if target.model_type not in TESTED_FAMILIES:
            check_trees(host)
        held[choice] = host
    return host
