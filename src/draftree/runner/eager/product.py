"""Matrix products of tensor operations: what a decoding step mostly consists of.

Linears that read the same input are one product on a copy of their weights, where the model is small enough to afford
it. Weights packed for oneDNN multiply a dozen rows several times as fast on a CPU, but every row count then holds
compiled kernels of its own: they are for passes of fixed shapes, in bfloat16, which has no other quick product.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COPY_LIMIT = 1024**3  # bytes of weights that may always be copied
FEW = 16  # rows that packing is told to expect
SHARE = 0.25  # of the free memory, which a copy that quickens much may take beyond that


def may_copy(model: Any, device: torch.device, *, compiled: bool) -> bool:
    """Whether the weights of `model` may be copied into a faster layout.

    Up to 1 GiB always, and where layers are `compiled` or weights packed, which are several times as fast at a dozen
    rows, as long as three times the copy stays free.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size <= COPY_LIMIT:
        return True
    free = free_bytes(device) if compiled else None
    return free is not None and size <= SHARE * free


def free_bytes(device: torch.device) -> int | None:
    """Memory that a new tensor on `device` may take; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def may_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of that type can be packed for oneDNN, and gain by it."""
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and dtype == torch.bfloat16 and bool(supported)


class Product:
    """One or more linears on the same input as one matrix product.

    Where a copy of the weights would cost too much, the stock weights are used side by side.

    Args:
        linears: stock modules with the same input.
        copy: whether a copy may be made.
        packed: whether it shall be packed for oneDNN; see `may_pack`.
    """

    def __init__(self, linears: list[nn.Linear], copy: bool, packed: bool = False) -> None:
        self.linears: list[Any] = list(linears)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._packed = packed and copy
        # One row reads float32 laid out [in, out] fastest; bfloat16 takes twice as long that way.
        self._turned = linears[0].weight.dtype == torch.float32
        if copy:
            weight = torch.cat([m.weight.detach() for m in linears])
            if self._packed:
                weight = torch.ops.mkldnn._reorder_linear_weight(weight, FEW)
            elif self._turned:
                weight = weight.t().contiguous()
            self.weight = weight
            if linears[0].bias is not None:
                self.bias = torch.cat([m.bias.detach() for m in linears])

    def tensors(self) -> list[Tensor]:
        """Weights and biases, as they are read at each call."""
        if self.weight is not None:
            return [self.weight] if self.bias is None else [self.weight, self.bias]
        return [t for m in self.linears for t in (m._parameters["weight"], m._parameters["bias"]) if t is not None]

    def live(self) -> list[Tensor]:
        """Those that are the stock model's own; none where they were copied."""
        return [] if self.weight is not None else self.tensors()

    def using(self, tensors: Iterator[Tensor]) -> Product:
        """The same product of other `tensors`, which are taken in their order."""
        other = copy.copy(self)
        if self.weight is not None:
            other.weight = next(tensors)
            other.bias = None if self.bias is None else next(tensors)
        else:
            other.linears = [
                SimpleNamespace(weight=next(tensors), bias=None if m.bias is None else next(tensors))
                for m in self.linears
            ]
        return other

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., the linears' outputs side by side]."""
        if self.weight is None:
            parts = [F.linear(x, m.weight, m.bias) for m in self.linears]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        rows = x.reshape(-1, x.shape[-1])
        if self._packed:
            out = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        elif not self._turned:
            return F.linear(x, self.weight, self.bias)
        else:
            out = torch.mm(rows, self.weight) if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return out.view(*x.shape[:-1], -1)
