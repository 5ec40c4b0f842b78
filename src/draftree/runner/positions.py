"""Rotary angles of tree rows, and how they are laid out in a head.

Most rotary modules are pure functions of the positions given. Two kinds ('dynamic' NTK and 'longrope') pick their
frequencies from the largest position of the *call*, so a tree row's angles would depend on its neighbours.
`per_row_angles` groups rows by the text's length at each, which is at least the prompt's as in Hugging Face's prefill,
and calls a fresh copy of the module for each group. So every row gets the angles of token-by-token decoding.

Most families turn the two halves of a head against each other. GLM turns neighbours, some turn only the first entries,
Gemma 3 has other angles in its sliding layers. `Rotation` covers all of them as `x * cosine + x[partner] * sine`, where
entries that are not turned have cosine 1 and sine 0.

**Masks**: who sees whom, per kind of layer, as additive floats. Windows and chunks limit *token positions*, not KV
positions: tree siblings share a token position, and slots of a batch end at different KV positions. Every attention
implementation accepts additive float masks, and on a CPU they are a tenth faster than boolean ones.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Segment

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
        neighbours: pairs are neighbours, not entries of the two halves.

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


# Rows may have later token positions than their number says (rows of a drafter, of which earlier ones were pruned). A
# window this close to the end of the context is applied, which is never wrong.
MARGIN = 64


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How far a layer looks."""

    name: str = "full_attention"  # Hugging Face's name (`full_attention`, `sliding_attention`, `chunked_attention`)
    window: int | None = None  # positions seen back, the row's own included; None for no limit
    chunk: int | None = None  # chunk length in positions; None for no limit


def limits(kind: LayerKind, length: int) -> bool:
    """Return whether a window or chunk of `kind` may cut something off of so many KV positions."""
    return any(limit is not None and limit <= length + MARGIN for limit in (kind.window, kind.chunk))


def near(kind: LayerKind, query: Tensor, key: Tensor) -> Tensor:
    """Return whether window and chunk let token positions `query` see `key`; a deep prefix (-1) is always seen."""
    distance = query - key
    let = torch.ones_like(distance, dtype=torch.bool) if kind.window is None else distance < kind.window
    if kind.chunk is not None:
        let = let & (query // kind.chunk == key // kind.chunk)
    return let | (key < 0)


class PassMasks:
    """Masks of one segment for every layer kind, built once each.

    Args:
        cache: open for the pass.
        first: slot of the first request.
        plain_row: whether a row that sees everything may have no mask.
    """

    def __init__(
        self, segment: Segment, cache: SlotCache, first: int, dtype: torch.dtype, *, plain_row: bool = False
    ) -> None:
        self.segment = segment
        self.prefix = cache.shown_prefix
        self.lengths = cache.lengths[first : first + segment.positions.shape[0]]
        self.dtype = dtype
        self._cached: dict[LayerKind, Tensor | None] = {}
        self._plain_row = plain_row

    @property
    def ragged(self) -> bool:
        """Whether the slots of the pass have different lengths."""
        return min(self.lengths) != max(self.lengths)

    @cached_property
    def key_positions(self) -> Tensor:
        """Token position at each KV position, LongTensor [B, K]; -1 in the deep prefix."""
        positions, longest = self.segment.positions, max(self.lengths)
        batch, rows = positions.shape
        context = torch.arange(longest + rows, device=positions.device).expand(batch, -1).clone()
        if self.ragged:
            start = torch.tensor(self.lengths, device=positions.device, dtype=torch.long)[:, None]
            context.scatter_(1, start + torch.arange(rows, device=positions.device), positions)
        else:
            context[:, longest:] = positions
        return torch.nn.functional.pad(context, (self.prefix, 0), value=-1)

    @cached_property
    def seen(self) -> Tensor:
        """Visibility without any window, BoolTensor [B, n, K]."""
        visible, longest = self.segment.visible, max(self.lengths)
        (batch, rows, covered), device = visible.shape, visible.device
        seen = torch.ones(batch, rows, longest + rows, dtype=torch.bool, device=device)
        if self.ragged:
            start = torch.tensor(self.lengths, device=device, dtype=torch.long)[:, None, None]
            seen &= torch.arange(longest + rows, device=device) < start
            place = (start + torch.arange(rows - covered, rows, device=device)).expand(batch, rows, covered)
            seen.scatter_(2, place.clamp(min=0), visible)
        else:
            seen[:, :, max(longest + rows - covered, 0) :] = visible[:, :, -(longest + rows) :]
        if not self.prefix:
            return seen
        on = self.segment.prefix_rows
        on = torch.zeros(batch, rows, dtype=torch.bool, device=device) if on is None else on
        return torch.cat([on[:, :, None].expand(-1, -1, self.prefix), seen], 2)

    def boolean(self, kind: LayerKind) -> Tensor:
        """Return who sees which KV position in layers of `kind`, BoolTensor [B, n, K]."""
        if kind.window is None and kind.chunk is None:
            return self.seen
        return self.seen & near(kind, self.segment.positions[:, :, None], self.key_positions[:, None, :])

    def additive(self, kind: LayerKind) -> Tensor | None:
        """Return [B, 1, n, K] of 0 and the dtype's minimum; None where one row may go unmasked."""
        kind = kind if self.limited(kind) else LayerKind()  # kinds that cut nothing off share a mask
        if kind not in self._cached:
            self._cached[kind] = self._additive(kind)
        return self._cached[kind]

    def limited(self, kind: LayerKind) -> bool:
        """Return whether a window or chunk of `kind` may cut something off in this pass."""
        return limits(kind, max(self.lengths) + self.segment.positions.shape[1])

    def _additive(self, kind: LayerKind) -> Tensor | None:
        alone = self._plain_row and self.segment.visible.shape[1:] == (1, 1) and not self.ragged
        if alone and not self.prefix and not self.limited(kind):
            return None
        seen = self.boolean(kind)
        low = torch.finfo(self.dtype).min
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, low)
        return mask[:, None]
