"""Whether a model computes what its class says.

Runners with layers of their own drive stock models alone: a class of transformers, made of modules of torch and
transformers, without hooks or replaced methods. Any other model goes through its own `forward`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from draftree.runner.weights.torchao import eight_bits

PACKAGES = ("torch", "transformers", "draftree")
# Modules that quantisers put in the place of linears, whose weights are no numbers of the model.
REPLACED = "transformers.integrations."
CAPTURING = "transformers.utils.output_capturing"  # hooks that stay on a model that has returned hidden states


def alteration(model: Any) -> str | None:
    """Return what of a model is not as transformers makes it, as a clause; None for a stock model."""
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is no class of transformers"
    for name, module in model.named_modules():
        of, where = type(module), f"its module {name!r}" if name else "the model"
        if of.__module__.partition(".")[0] not in PACKAGES or of.__module__.startswith(REPLACED):
            return f"{where} is a {of.__name__}"
        if has_hooks(module):
            return f"{where} has hooks"
        if "forward" in vars(module):
            return f"{where} has a forward of its own"
        for parameter in module._parameters.values():
            plain = parameter is None or type(parameter) in (nn.Parameter, Tensor)
            if not plain and (of is not nn.Linear or eight_bits(parameter) is None):
                return f"{where} has weights of the class {type(parameter).__name__}"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks look at, or change, what a module gets and returns."""
    return "_hf_hook" in vars(module) or bool(hooks_of(module))


def hooks_of(module: nn.Module) -> list[int]:
    """Return torch's numbers of a module's hooks, without those by which transformers captures outputs."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return []
    hooks = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
    return [number for number, hook in hooks if getattr(hook, "__module__", None) != CAPTURING]
