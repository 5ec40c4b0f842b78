"""Matrix products on weights laid out for thin inputs: what a decoding step mostly consists of.

A step multiplies a handful of rows, where a CPU's stock `linear` is far from both its limits. One row is fastest on
weights laid out [in, out]; several rows on weights packed for oneDNN (12 rows on two cores: 1.05 ms against 2.1 ms for
all products of the embedded model). Both copies are made once, where the model is small enough to afford them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COPY_LIMIT = 1024**3  # bytes of weights; above it the copies cost more memory than their speed is worth
PACKED_FROM = 2  # rows from which the packed weights win
PACKED_ROWS = 16  # row count the packing is asked for; it serves all others as well


class Product:
    """One or more linears on the same input as one matrix product.

    Where copies of the weights would cost too much, the stock weights are used side by side.

    Args:
        linears: stock modules with the same input.
        copy: whether copies may be made.
    """

    def __init__(self, linears: list[nn.Linear], copy: bool) -> None:
        self.linears = linears
        self.weight: Tensor | None = None
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        if copy:
            joined = torch.cat([m.weight.detach() for m in linears])
            self.weight = joined.t().contiguous()
            self.packed = _pack(joined)
            if linears[0].bias is not None:
                self.bias = torch.cat([m.bias.detach() for m in linears])

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., the linears' outputs side by side]."""
        if self.weight is None:
            parts = [F.linear(x, m.weight, m.bias) for m in self.linears]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        rows = x.reshape(-1, x.shape[-1])
        if self.packed is not None and len(rows) >= PACKED_FROM:
            out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        elif self.bias is None:
            out = torch.mm(rows, self.weight)
        else:
            out = torch.addmm(self.bias, rows, self.weight)
        return out.view(*x.shape[:-1], -1)


def _pack(weight: Tensor) -> Tensor | None:
    """`weight` [out, in] packed for oneDNN; None where this build or type of weight has no packing."""
    if weight.dtype != torch.float32 or not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)
        probe = torch.zeros(PACKED_FROM, weight.shape[1])
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # the operators are torch's own but not public; mm serves without them
        return None
    return packed
