"""Whether a model computes by code of the user's own, which may do otherwise though no weight or setting changed."""

from __future__ import annotations

from typing import Any

from torch import nn

from draftree.runner.weights.stock import LOOSE, has_hooks

# Whose modules compute with weights, settings and switches, which are compared before a text.
PACKAGES = (
    *("torch", "transformers", "transformers_modules", "draftree"),
    *("peft", "accelerate", "optimum"),
    *("torchao", "bitsandbytes", "awq", "gptqmodel", "hqq", "compressed_tensors"),
)
SHOWN = ("extra_repr", *LOOSE)  # methods on a module itself that change nothing about what it computes


def of_packages(one: Any) -> bool:
    """Whether a class or function belongs to one of `PACKAGES`."""
    return str(one.__module__).partition(".")[0] in PACKAGES


def runs_users_code(model: nn.Module) -> bool:
    """Whether any module has hooks, a class of the user's own, or methods that were replaced on it.

    What such code reads (a coefficient in a variable, say) may be another for the next text.
    """
    return any(has_hooks(module) or _of_the_users(module) for module in model.modules())


def _of_the_users(module: nn.Module) -> bool:
    kind = type(module)
    replaced = (name for name, value in vars(module).items() if callable(value) and hasattr(kind, name))
    return not of_packages(kind) or any(name not in SHOWN for name in replaced)
