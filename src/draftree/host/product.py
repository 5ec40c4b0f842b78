"""Matrix products on weights laid out for thin inputs: what a decoding step mostly consists of.

A step multiplies a handful of rows, for which a CPU reads weights laid out [in, out] fastest. The copy is made once,
where the model is small enough to afford it. (Weights packed for oneDNN multiply a dozen rows faster still, but every
row count then holds compiled kernels of its own, a fifth more memory over a few prompts.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COPY_LIMIT = 1024**3  # bytes of weights that may always be copied
SHARE = 0.25  # of the free memory, which a copy for the compiled layers may take beyond that


def may_copy(model: Any, device: torch.device, *, compiled: bool) -> bool:
    """Whether the weights of `model` may be copied into a faster layout.

    Up to 1 GiB always, and where layers are `compiled`, which are several times as fast at a dozen rows, as long as
    three times the copy stays free.
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


class Product:
    """One or more linears on the same input as one matrix product.

    Where a copy of the weights would cost too much, the stock weights are used side by side.

    Args:
        linears: stock modules with the same input.
        copy: whether a copy may be made.
    """

    def __init__(self, linears: list[nn.Linear], copy: bool) -> None:
        self.linears = linears
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if copy:
            self.weight = torch.cat([m.weight.detach() for m in linears]).t().contiguous()
            if linears[0].bias is not None:
                self.bias = torch.cat([m.bias.detach() for m in linears])

    def live(self) -> list[Tensor]:
        """The stock weights that are read at each call; none where they were copied."""
        if self.weight is not None:
            return []
        return [t for m in self.linears for t in (m._parameters["weight"], m._parameters["bias"]) if t is not None]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., the linears' outputs side by side]."""
        if self.weight is None:
            parts = [F.linear(x, m.weight, m.bias) for m in self.linears]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(rows, self.weight) if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return out.view(*x.shape[:-1], -1)
