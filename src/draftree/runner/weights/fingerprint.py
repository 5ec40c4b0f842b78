"""A sample of a model's weights, by which a change is noticed in less than a millisecond.

Runners that are faster than the model's own `forward` keep weights in a layout of their own, and free slots keep keys
and values for prompts to come. Both hold for the weights of before. Version counters of tensors do not tell, as fused
optimizers and edits of `parameter.data` leave them unchanged. Training, a merged adapter and newly loaded weights
change nearly every number, so some hundred of each tensor do. An edit of single numbers is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from draftree.runner.weights.stock import hooks_of

SAMPLES = 128  # numbers of each tensor


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Return what changes where weights, their number or the hooks of a model change.

    Weights that accelerate keeps elsewhere between calls, and those of unknown classes, are counted and not read.
    """
    hooks: list[int] = []
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    count = 0
    for module in model.modules():
        hooks += hooks_of(module)
        for tensor in _weights(module):
            held, size = tensor.detach(), tensor.numel()
            if type(held) is Tensor:
                held = held if held.is_contiguous() else held.contiguous()
                some = held.as_strided((min(size, SAMPLES),), (max(1, size // SAMPLES),))
                samples.setdefault((held.device, held.dtype), []).append(some)
            count += 1
    read = [torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in samples.values()]
    return count, *hooks, *read


def _weights(module: nn.Module) -> Iterator[Tensor]:
    held = [*module._parameters.values(), module._buffers.get("panels")]
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
