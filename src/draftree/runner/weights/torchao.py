"""Linears whose weights torchao keeps in 8 bits: how they are recognised, and what they take."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def eight_bits(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of a weight that torchao keeps in 8 bits, as `Int8WeightOnlyConfig` does.

    Returns:
        whole numbers int8 [outputs, inputs] and the scale of each output, [outputs] in the type of results; None for
        any other tensor, those of torchao that are not multiplied so included.
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
    """Whether linears of a model have such weights."""
    return any(type(m) is nn.Linear and eight_bits(m.weight) is not None for m in model.modules())


def weight_bytes(weight: Tensor) -> int:
    """Bytes that a weight takes."""
    found = eight_bits(weight)
    return weight.nbytes if found is None else sum(part.nbytes for part in found)
