"""draftree lets any Hugging Face model emit several tokens per forward pass without changing what it says.

This is the public face. What it names must import quickly: torch and transformers are imported where they are
used, so that a command which only prints its help does not wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# `demo_model` is also the name of its module: imported here, once, so that the function is what stays bound.
from draftree.demo_model import demo_model as demo_model
from draftree.version import __version__ as __version__

# Where each public name lives: once for type checkers, which follow no dict, and once for Python.
if TYPE_CHECKING:
    from draftree.acceptance import LossyTypical as LossyTypical
    from draftree.chat import Chat as Chat
    from draftree.drafting import BiLD as BiLD
    from draftree.drafting import BiTA as BiTA
    from draftree.drafting import DraftModel as DraftModel
    from draftree.drafting import GrammarDrafter as GrammarDrafter
    from draftree.drafting import HiddenTransfer as HiddenTransfer
    from draftree.drafting import Lookahead as Lookahead
    from draftree.drafting import Medusa as Medusa
    from draftree.drafting import Merge as Merge
    from draftree.drafting import PromptLookup as PromptLookup
    from draftree.drafting.folder import demo_drafter as demo_drafter
    from draftree.drafting.folder import load_drafter as load_drafter
    from draftree.engine import Engine as Engine
    from draftree.engine import Recorder as Recorder
    from draftree.engine import SamplingParams as SamplingParams
    from draftree.engine import generate as generate
    from draftree.grammar import Grammar as Grammar
    from draftree.integrations import custom_generate as custom_generate
    from draftree.models import load_model as load_model
    from draftree.pruning import EarlyHead as EarlyHead
    from draftree.pruning import EarlyPruning as EarlyPruning
    from draftree.pruning import demo_early_head as demo_early_head
    from draftree.runner import open_runner as open_runner
    from draftree.runner import pack_weights as pack_weights
    from draftree.runner import unpack_weights as unpack_weights
    from draftree.shaping import DynamicTree as DynamicTree
    from draftree.shaping import Fixed as Fixed
    from draftree.trace.file import read_trace as read_trace
    from draftree.trace.file import write_trace as write_trace
    from draftree.trace.file import write_trace_page as write_trace_page
    from draftree.tuning.file import load_tuned as load_tuned

_ROOMS = {
    "draftree.acceptance": ("LossyTypical",),
    "draftree.chat": ("Chat",),
    "draftree.drafting": (
        "BiLD",
        "BiTA",
        "DraftModel",
        "GrammarDrafter",
        "HiddenTransfer",
        "Lookahead",
        "Medusa",
        "Merge",
        "PromptLookup",
    ),
    "draftree.drafting.folder": ("demo_drafter", "load_drafter"),
    "draftree.engine": ("Engine", "Recorder", "SamplingParams", "generate"),
    "draftree.grammar": ("Grammar",),
    "draftree.integrations": ("custom_generate",),
    "draftree.models": ("load_model",),
    "draftree.pruning": ("EarlyHead", "EarlyPruning", "demo_early_head"),
    "draftree.runner": ("open_runner", "pack_weights", "unpack_weights"),
    "draftree.shaping": ("DynamicTree", "Fixed"),
    "draftree.trace.file": ("read_trace", "write_trace", "write_trace_page"),
    "draftree.tuning.file": ("load_tuned",),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}
_PUBLIC = sorted(["demo_model", *_HOMES])
if not TYPE_CHECKING:  # for type checkers it is the imports above
    __all__ = _PUBLIC


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if _HOMES[name].startswith("draftree.drafting"):
            import_module("draftree.integrations")  # drafters are decoding loops of Hugging Face's as well
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'draftree' has no attribute {name!r}; it has {', '.join(_PUBLIC)}.")


def __dir__() -> list[str]:
    return _PUBLIC
