"""Rotary angles of tree rows, and how they are laid out in a head.

Most rotary modules are pure functions of the positions given. Two kinds ('dynamic' NTK and 'longrope') pick their
frequencies from the largest position of the *call*, so a tree row's angles would depend on its neighbours.
`per_row_angles` groups rows by the text's length at each, which is at least the prompt's as in Hugging Face's prefill,
and calls a fresh copy of the module for each group. So every row gets the angles of token-by-token decoding.

Most families turn the two halves of a head against each other. GLM turns neighbours, some turn only the first entries,
Gemma 3 has other angles in its sliding layers. `Rotation` covers all of them as `x * cosine + x[partner] * sine`, where
entries that are not turned have cosine 1 and sine 0.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH_DEPENDENT = ("dynamic", "longrope")


def is_length_dependent(module: nn.Module) -> bool:
    """Return whether a rotary module chooses its frequencies from the length of the call, for layers of any kind."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in LENGTH_DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def per_row_angles(
    module: Any, x: Tensor, positions: Tensor, prompt_lengths: tuple[int, ...], layer_type: str | None = None
) -> Any:
    """Return the output of a length-dependent rotary `module`, in most families cosines and sines [B, N, dim], by row.

    Args:
        module: the model's rotary module.
        x: a tensor of the rows' device and dtype.
        positions: LongTensor [B, N].
        prompt_lengths: per request, the least length that picks frequencies; empty for none.
        layer_type: of the layers that the angles are for, where these differ.
    """
    lengths = positions + 1
    if prompt_lengths:
        least = torch.tensor(prompt_lengths, device=positions.device, dtype=torch.long)
        lengths = torch.maximum(lengths, least[:, None])
    lengths, rows = _representatives(module, lengths, layer_type).flatten(), positions.flatten()
    layer_types = () if layer_type is None else (layer_type,)
    groups = []
    for length in lengths.unique().tolist():  # in rising order
        group = F.pad(rows[lengths == length], (0, 1), value=length - 1)[None]  # the last row picks the frequencies
        groups.append(type(module).forward(_fresh_copy(module), x, group, *layer_types))
    order = lengths.argsort(stable=True).argsort()  # place of each row in the groups

    def joined(tensors: Any) -> Tensor:
        return torch.cat([t[0, :-1] for t in tensors])[order].unflatten(0, positions.shape)

    return joined(groups) if torch.is_tensor(groups[0]) else tuple(map(joined, zip(*groups, strict=True)))


def _representatives(module: Any, lengths: Tensor, layer_type: str | None) -> Tensor:
    """Return for each length one that picks the same frequencies and is no smaller, the same in all of a group."""
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind == "dynamic":
        return lengths.clamp(min=module.original_max_seq_len)
    if kind != "longrope":
        return lengths.amax().expand_as(lengths)
    parameters = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    original = parameters["original_max_position_embeddings"]
    return torch.where(lengths > original, lengths.amax(), original)


def _fresh_copy(module: Any) -> Any:
    """Return a copy of a rotary module as it was before its first call."""
    copied, buffers = copy.copy(module), module._buffers
    originals = {name: buffers.get(name.replace("inv_freq", "original_inv_freq"), buffers[name]) for name in buffers}
    copied._buffers = {name: tensor.clone() for name, tensor in originals.items()}
    for name in vars(copied):
        if name.endswith("max_seq_len_cached"):
            setattr(copied, name, module.original_max_seq_len)
    return copied


class Rotation:
    """The pairs of entries of a head that are turned against each other.

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
        """Return angles [..., width] of the model's rotary module as [..., dim], signs included in the sine."""
        if self.neighbours:
            half = self.width // 2
            cosine, sine = (t[..., :half].repeat_interleave(2, -1) for t in (cosine, sine))
            sine = sine * torch.tensor([-1, 1], device=sine.device, dtype=sine.dtype).repeat(half)
        else:
            sine = torch.cat([-sine[..., : self.width // 2], sine[..., self.width // 2 :]], -1)
        rest = self.dim - self.width
        return F.pad(cosine, (0, rest), value=1.0), F.pad(sine, (0, rest))

    def partners(self, x: Tensor) -> Tensor:
        """Return every entry's partner, for x [..., dim]."""
        return x.roll(self.dim // 2, -1) if self.plain else x.index_select(-1, self.partner)
