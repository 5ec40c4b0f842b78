"""draftree lets any Hugging Face model emit several tokens per forward pass without changing what it says.

The public names are listed in `__init__.pyi`. Each is imported on first use, so that a command which only prints its
help does not wait for torch and transformers.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.resources import files
from typing import Any

# `demo_model` is also the name of its module: imported here, once, so that the function is what stays bound.
from draftree.demo_model import demo_model as demo_model

__version__ = "0.2.0"

_STUB = ast.parse((files(__name__) / "__init__.pyi").read_text(encoding="utf-8"))
_HOMES = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if _HOMES[name].startswith("draftree.drafting"):
            import_module("draftree.integrations")  # drafters are decoding loops of Hugging Face's as well
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'draftree' has no attribute {name!r}; it has {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return __all__
