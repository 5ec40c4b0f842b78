"""Checks of a model's modules and weights: stock classes, torchao's 8-bit weights, changes between two calls.

Runners with layers of their own drive stock models alone: a class of transformers, made of modules of torch and
transformers, without hooks or replaced methods. Any other model runs through its own `forward`.

Faster runners copy weights, and free slots hold keys and values for later prompts. Both are stale after a change of
the weights, so a sample of the weights is compared. Version counters of tensors do not suffice: fused optimizers and
edits of `parameter.data` leave them unchanged. Training, merged adapters and newly loaded weights change nearly every
number, so some hundred of each tensor show it. An edit of single numbers is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def eight_bits(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the parts of a weight that torchao holds in 8 bits, as `Int8WeightOnlyConfig` does.

    Returns:
        whole numbers int8 [outputs, inputs] and the scale of each output, [outputs] in the type of results; None for
        any other tensor, including torchao's other kinds.
    """
    kind: Any = type(weight)
    if kind.__name__ != "Int8Tensor" or not kind.__module__.startswith("torchao.") or weight.dim() != 2:
        return None
    held: Any = weight
    more = (getattr(held, name, None) for name in ("act_quant_kwargs", "act_pre_scale"))
    if any(part is not None for part in more) or held.block_size[-1] < weight.shape[1]:
        return None
    zero = getattr(held, "zero_point", None)
    if held.scale.numel() not in (1, len(weight)) or (zero is not None and bool(zero.any())):
        return None
    return held.qdata, held.scale.to(weight.dtype).flatten().expand(len(weight))


def has_eight_bits(model: nn.Module) -> bool:
    """Return whether linears of a model have such weights."""
    return any(type(m) is nn.Linear and eight_bits(m.weight) is not None for m in model.modules())


def weight_bytes(weight: Tensor) -> int:
    """Return the bytes of a weight."""
    found = eight_bits(weight)
    return weight.nbytes if found is None else sum(part.nbytes for part in found)


@torch.no_grad()
def rounding_linear(model: nn.Module) -> str | None:
    """Return the name of a linear that rounds its input, as products of 8 bits do; None if none does.

    Such a product is not affine: f(x + y) + f(x - y) - 2 f(x) is larger than the rounding of its own type.
    """
    tried = set()
    for name, module in model.named_modules():
        inputs, kind = getattr(module, "in_features", None), (type(module), type(getattr(module, "weight", None)))
        if not isinstance(inputs, int) or kind in tried:
            continue
        tried.add(kind)
        dtype: torch.dtype = getattr(model, "dtype", torch.float32)
        device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
        seeded = torch.Generator("cpu").manual_seed(0)
        x, y = torch.randn(2, 2, inputs, generator=seeded, dtype=torch.float32, device="cpu").to(device, dtype)
        up, down, middle = (module(each).cpu().double() for each in (x + y, x - y, x))
        if float((up + down - 2 * middle).norm() / middle.norm()) > (1e-3 if dtype.itemsize == 4 else 0.015):
            return name
    return None


PACKAGES = ("torch", "transformers", "draftree")
# Modules that quantisers put in the place of linears, whose weights are no numbers of the model.
REPLACED = "transformers.integrations."
CAPTURING = "transformers.utils.output_capturing"  # hooks that stay on a model that has returned hidden states


def alteration(model: Any) -> str | None:
    """Return a clause that names an altered part of a model; None for a stock model."""
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


SAMPLES = 128  # numbers of each tensor


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Return a value that changes with the weights, their addresses or the hooks of a model.

    Weights that accelerate keeps elsewhere between calls, and those of unknown classes, are not read.
    """
    hooks: list[int] = []
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    addresses: list[int] = []
    for module in model.modules():
        hooks += hooks_of(module)
        for tensor in _weights(module):
            held, size = tensor.detach(), tensor.numel()
            if type(held) is Tensor:
                addresses.append(held.data_ptr())
                held = held if held.is_contiguous() else held.contiguous()
                some = held.as_strided((min(size, SAMPLES),), (max(1, size // SAMPLES),))
                samples.setdefault((held.device, held.dtype), []).append(some)
    read = [torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in samples.values()]
    return tuple(addresses), *hooks, *read


def _weights(module: nn.Module) -> Iterator[Tensor]:
    held = [*module._parameters.values(), module._buffers.get("packed")]
    for tensor in held:
        if tensor is not None:
            yield from (part for part in parts_of(tensor) if not part.is_meta and part.numel())


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, or those that a quantised one is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from parts_of(getattr(tensor, name))
