"""Matrix products of tensor operations: what a decoding step mostly consists of.

There are two ways to multiply the rows of a step with linears that read the same input, one class each: with the stock
weights one after the other, and with one copy of them side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.placement import free_bytes
from draftree.runner.weights.packed import PackedLinear
from draftree.runner.weights.torchao import weight_bytes

COPY_LIMIT = 1024**3  # bytes of weights that may always be copied
SHARE = 0.25  # of the free memory, which a copy that is much faster may take beyond that


def may_copy(model: Any, device: torch.device, *, much_faster: bool) -> bool:
    """Whether the weights of `model` may be copied into a faster layout.

    Up to 1 GiB always; where the copy is several times as fast at a dozen rows (`much_faster`: compiled), as
    long as three times the copy stays free.
    """
    size = sum(weight_bytes(p) for p in model.parameters())
    if size <= COPY_LIMIT:
        return True
    free = free_bytes(device) if much_faster else None
    return free is not None and size <= SHARE * free


class StockProduct:
    """Linears on the same input, by the stock weights: nothing is copied.

    Args:
        linears: stock modules with the same input.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._linears: list[Any] = list(linears)

    def linears(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight [out, in] and bias [out] of each, as a call would read them; for linears that are not packed."""
        return [(m._parameters["weight"], m._parameters["bias"]) for m in self._linears]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., the linears' outputs side by side]."""
        outputs = self.outputs(x)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def outputs(self, x: Tensor) -> list[Tensor]:
        """The same before it is joined: an output of each linear, or a single one where the weights are fused."""
        return [m(x) if isinstance(m, PackedLinear) else F.linear(x, m.weight, m.bias) for m in self._linears]


class FusedProduct(StockProduct):
    """The same as one product with a copy of the weights."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        weight = torch.cat([m.weight.detach() for m in linears])
        self.bias = None if linears[0].bias is None else torch.cat([m.bias.detach() for m in linears])
        self.weight = self._laid_out(weight)

    @staticmethod
    def _laid_out(weight: Tensor) -> Tensor:
        # One row reads float32 laid out [in, out] fastest; bfloat16 takes twice as long that way.
        return weight.t().contiguous().t() if weight.dtype == torch.float32 else weight

    def linears(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(self.weight, self.bias)]

    def outputs(self, x: Tensor) -> list[Tensor]:
        return [self(x)]

    def __call__(self, x: Tensor) -> Tensor:
        """See `StockProduct`."""
        if x.dtype != torch.float32:
            return F.linear(x, self.weight, self.bias)
        rows, weight = x.reshape(-1, x.shape[-1]), self.weight.t()
        out = torch.mm(rows, weight) if self.bias is None else torch.addmm(self.bias, rows, weight)
        return out.view(*x.shape[:-1], -1)
