"""The tensors of an inflated model: the small one's in their places, zeros behind them, noise where it has no effect.

See `benchmarks.inflate` for why the result says the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.inflate.places import Places, among

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
ZEROS = ("o_proj", "out_proj", "down_proj", "embed_tokens", "lm_head")
SPREAD = 0.02  # standard deviation of weights that are read and change nothing
# What a token that the small model does not have is given: NEVER * GAIN * constant / root mean square of the states.
NEVER, GAIN = -6e4, 1e3


@dataclass(frozen=True, slots=True)
class Scales:
    """By how much tensors of the small model grow; `benchmarks.inflate` says why."""

    states: float  # what is added to hidden states
    queries: float
    keys: float
    query_norm: float
    unit: int  # what norms add to their weights

    @classmethod
    def of(cls, small: Any, large: Any, places: Places, constant: float) -> Scales:
        """Return those between two configs."""
        wider = math.sqrt(places.large.head_dim / places.small.head_dim)
        if not places.small.recurrent:
            return cls(1.0, wider, 1.0, 1.0, 0)
        epsilon = large.rms_norm_eps / small.rms_norm_eps
        freed = constant**2 / small.rms_norm_eps
        states = math.sqrt((large.hidden_size * epsilon + freed) / small.hidden_size)
        heads = math.sqrt(epsilon) * wider
        return cls(states, heads, heads, wider, 1)


@torch.no_grad()
def inflated_weights(
    model: Any,
    shapes: dict[str, tuple[int, ...]],
    places: Places,
    scales: Scales,
    dtype: torch.dtype,
    device: torch.device,
    constant: float,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the inflated model by its name, of the large one's `shapes`.

    `model` is the small one, whose tensors grow by `scales`, and `constant` the value of the hidden states' constant
    entry, where there is one.
    """
    made = _Tensors(places, scales, dtype, device)
    small = places.small
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    state.setdefault(HEAD, state[EMBEDDING])
    held = {places.layer(i): i for i in range(small.layers)}
    for name, shape in shapes.items():
        tensor, source = made.idle(name, shape), name
        if (layer := re.match(r"model\.layers\.(\d+)\.", name)) is not None:
            source = f"model.layers.{held.get(int(layer[1]))}.{name[layer.end() :]}"
        if source in state:
            made.fill(tensor, name, state[source])
        if places.constant is not None:
            if name == EMBEDDING:
                tensor[:, places.constant] = constant
            elif name == HEAD:
                tensor[small.vocab_size :, places.constant] = NEVER
            elif name == LAST_NORM:
                tensor[places.constant] = GAIN - scales.unit
        yield name, tensor


class _Tensors:
    """Makes them in their final type and place."""

    def __init__(self, places: Places, scales: Scales, dtype: torch.dtype, device: torch.device) -> None:
        self._places, self._scales, self._dtype, self._device = places, scales, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def norm(self, name: str, width: int, weight: Tensor | None = None) -> Tensor:
        """Return a norm's weight [width] of the large model; `weight` [d] is the small one's, None for ones."""
        places, small, unit = self._places, self._places.small, self._scales.unit
        if "linear_attn" in name:
            unit, entries = 0, torch.arange(small.value_width)
        elif "self_attn" in name:
            entries = places.turned()
        else:
            entries = torch.arange(small.hidden_size)
        shrink = math.sqrt(len(entries) / width) * (self._scales.query_norm if "q_norm" in name else 1.0)
        made = torch.full((width,), shrink)
        if weight is not None:
            made[entries] = (weight.cpu() + unit) * shrink
        if places.constant is not None and "attn." not in name:
            made[places.constant] = 0
        return (made - unit).to(self._device, self._dtype)

    def idle(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor with which a layer works on its input and adds nothing to it; of embedding and head, zeros."""
        if "norm" in name:
            return self.norm(name, shape[0])
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("bias") or any(part in name for part in ZEROS):
            # Zeros are written, because fresh zeros of the system are all one page of memory, read from a cache.
            return made.zero_()
        reach = SPREAD * math.sqrt(3)
        made.uniform_(-reach, reach, generator=self._generator)
        # Numbers that bfloat16 and float16 both hold, as most published checkpoints are of 16 bits.
        return made.copy_(made.bfloat16().half())

    def fill(self, into: Tensor, name: str, tensor: Tensor) -> None:
        """Put a tensor of the small model into the idle one: other columns of the rows that it takes become 0."""
        if "norm" in name:
            into.copy_(self.norm(name, into.shape[0], tensor))
            return
        # A bias is a matrix of one column, and the kernels of a convolution one of several.
        into, tensor = (t[:, None] if t.dim() == 1 else t.flatten(1) for t in (into, tensor))
        columns = self._columns(name, tensor.shape[1])
        cleared, copies, scale = self._rows(name, tensor.shape[0])
        into[cleared.to(self._device)] = 0
        for rows in (rows.to(self._device) for rows in copies):
            into[rows] = 0
            into[rows[:, None], columns.to(self._device)] = (tensor.cpu() * scale).to(self._device, self._dtype)

    def _columns(self, name: str, count: int) -> Tensor:
        places, small, large = self._places, self._places.small, self._places.large
        if name.endswith("o_proj.weight"):
            return places.rows(places.query_heads, torch.arange(small.head_dim))
        if name.endswith("out_proj.weight"):
            return among(large.value_width, range(small.value_heads), torch.arange(small.value_width))
        return torch.arange(count) + (large.kernel - small.kernel if "conv1d" in name else 0)

    def _rows(self, name: str, count: int) -> tuple[Tensor, list[Tensor], Tensor | float]:
        """Return which rows to clear, those of each copy of a tensor of `count` rows, and its scale."""
        places, small, large, scales = self._places, self._places.small, self._places.large, self._scales
        none, straight, turned = torch.arange(0), torch.arange(small.head_dim), places.turned()
        copies, part = [places.key_heads(number) for number in range(places.copies)], name.split(".")[-2]
        if part in ("embed_tokens", "o_proj", "out_proj", "down_proj"):
            return none, [torch.arange(count)], scales.states
        if part == "q_proj" and small.recurrent:  # A head's gates lie behind its queries.
            entries, width = torch.cat([turned, large.head_dim + straight]), 2 * large.head_dim
            scale = torch.cat([torch.full((small.head_dim,), scales.queries), torch.ones(small.head_dim)])
            heads = places.query_heads
            whole = among(width, heads, torch.arange(width))
            return whole, [among(width, heads, entries)], scale.repeat(small.heads)[:, None]
        # What the small model's heads do not have adds nothing to their scores, norms and states.
        if part == "q_proj":
            heads = places.query_heads
            return places.rows(heads, torch.arange(large.head_dim)), [places.rows(heads, turned)], scales.queries
        if part == "k_proj":
            whole = torch.cat([places.rows(heads, torch.arange(large.head_dim)) for heads in copies])
            return whole, [places.rows(heads, turned) for heads in copies], scales.keys
        if part == "v_proj":
            return none, [places.rows(heads, straight) for heads in copies], 1.0
        if part in ("in_proj_qkv", "conv1d"):
            whole = places.recurrent_rows(large.key_width, large.value_width)
            return whole, [places.recurrent_rows(small.key_width, small.value_width)], 1.0
        if part == "in_proj_z":
            return none, [among(large.value_width, range(small.value_heads), torch.arange(small.value_width))], 1.0
        return none, [torch.arange(count)], 1.0
