"""Rotary angles as the eager runner's layers take them, whatever a family's way of turning is.

Most families turn the two halves of a head against each other. GLM turns neighbours, some turn only the first entries,
Gemma 3 has other angles in its sliding layers. All of it is `x * cosine + x[partner] * sine` with the right partner and
signs, where entries that are not turned have cosine 1 and sine 0.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Rotation:
    """Which entry of a head is turned with which.

    Args:
        width: entries that are turned, the first ones.
        dim: width of a head.
        neighbours: pairs are neighbours, not entries of the two halves.
        device: where the heads are.

    Attributes:
        plain: all of a head is turned, its halves against each other.
        partner: LongTensor [dim].
    """

    def __init__(self, width: int, dim: int, neighbours: bool, device: torch.device) -> None:
        self.width, self.dim, self.neighbours = width, dim, neighbours
        self.plain = width == dim and not neighbours
        turned = torch.arange(width, device="cpu")
        partner = turned ^ 1 if neighbours else turned.roll(width // 2)
        self.partner = torch.cat([partner, torch.arange(width, dim, device="cpu")]).to(device)

    def spread(self, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """Angles [..., width] of the model's rotary module as [..., dim], signs included in the sine."""
        if self.neighbours:
            half = self.width // 2
            cosine, sine = (t[..., :half].repeat_interleave(2, -1) for t in (cosine, sine))
            sine = sine * torch.tensor([-1, 1], device=sine.device, dtype=sine.dtype).repeat(half)
        else:
            sine = torch.cat([-sine[..., : self.width // 2], sine[..., self.width // 2 :]], -1)
        rest = self.dim - self.width
        return F.pad(cosine, (0, rest), value=1.0), F.pad(sine, (0, rest))

    def partners(self, x: Tensor) -> Tensor:
        """Every entry's partner, for x [..., dim]."""
        return x.roll(self.dim // 2, -1) if self.plain else x.index_select(-1, self.partner)


def call(module: Any, positions: Tensor, dtype: torch.dtype, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, N, width] of a model's rotary module."""
    like = torch.empty(1, 1, 1, dtype=dtype, device=positions.device)
    arguments = (layer_type,) if layer_type is not None else ()
    cosine, sine = module(like, positions, *arguments)
    return cosine, sine


def width_of(module: Any, device: torch.device, layer_type: str | None = None) -> int:
    """How many entries of a head a rotary module turns."""
    copied = copy.copy(module)  # a call of some changes what they remember of earlier ones
    copied._buffers = dict(module._buffers)
    with torch.no_grad():
        cosine, _ = call(copied, torch.zeros(1, 1, dtype=torch.long, device=device), torch.float32, layer_type)
    return int(cosine.shape[-1])
