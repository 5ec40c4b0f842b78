"""draftree lets any Hugging Face model emit several tokens per forward pass without changing what it says.

This is the public face. What it names must import quickly: torch and transformers are imported where they are
used, so that a command which only prints its help does not wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# `demo_model` is also the name of its module: imported here, once, so that the function is what stays bound.
from draftree.demo_model import demo_model
from draftree.version import __version__ as __version__

if TYPE_CHECKING:
    from draftree.acceptance import LossyTypical
    from draftree.chat import Chat
    from draftree.drafting import (
        BiLD,
        BiTA,
        DraftModel,
        GrammarDrafter,
        HiddenTransfer,
        Jacobi,
        Lookahead,
        Medusa,
        Merge,
        PromptLookup,
        SelfSpeculative,
    )
    from draftree.drafting.early_exit import early_exit_model
    from draftree.drafting.folder import demo_drafter, load_drafter
    from draftree.engine import Engine, Recorder, Rules, generate
    from draftree.grammar import Grammar
    from draftree.integrations import custom_generate
    from draftree.pruning import EarlyHead, EarlyPruning, LossyCALM, demo_early_head
    from draftree.runner import open_runner, pack_weights, unpack_weights
    from draftree.shaping import DynamicTree, Fixed
    from draftree.trace.file import read_trace, write_trace
    from draftree.trace.page import write_trace_page
    from draftree.tuning.file import load_tuned


__all__ = [
    "BiLD",
    "BiTA",
    "Chat",
    "DraftModel",
    "DynamicTree",
    "EarlyHead",
    "EarlyPruning",
    "Engine",
    "Fixed",
    "Grammar",
    "GrammarDrafter",
    "HiddenTransfer",
    "Jacobi",
    "Lookahead",
    "LossyCALM",
    "LossyTypical",
    "Medusa",
    "Merge",
    "PromptLookup",
    "Recorder",
    "Rules",
    "SelfSpeculative",
    "custom_generate",
    "demo_drafter",
    "demo_early_head",
    "demo_model",
    "early_exit_model",
    "generate",
    "load_drafter",
    "load_tuned",
    "open_runner",
    "pack_weights",
    "read_trace",
    "unpack_weights",
    "write_trace",
    "write_trace_page",
]

_ROOMS = {
    "draftree.acceptance": ("LossyTypical",),
    "draftree.chat": ("Chat",),
    "draftree.drafting": (
        "BiLD",
        "BiTA",
        "DraftModel",
        "GrammarDrafter",
        "HiddenTransfer",
        "Jacobi",
        "Lookahead",
        "Medusa",
        "Merge",
        "PromptLookup",
        "SelfSpeculative",
    ),
    "draftree.drafting.early_exit": ("early_exit_model",),
    "draftree.drafting.folder": ("demo_drafter", "load_drafter"),
    "draftree.engine": ("Engine", "Recorder", "Rules", "generate"),
    "draftree.grammar": ("Grammar",),
    "draftree.integrations": ("custom_generate",),
    "draftree.pruning": ("EarlyHead", "EarlyPruning", "LossyCALM", "demo_early_head"),
    "draftree.runner": ("open_runner", "pack_weights", "unpack_weights"),
    "draftree.shaping": ("DynamicTree", "Fixed"),
    "draftree.trace.file": ("read_trace", "write_trace"),
    "draftree.trace.page": ("write_trace_page",),
    "draftree.tuning.file": ("load_tuned",),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if _HOMES[name].startswith("draftree.drafting"):
            import_module("draftree.integrations")  # drafters are decoding loops of Hugging Face's as well
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'draftree' has no attribute {name!r}; it has {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted(__all__)
