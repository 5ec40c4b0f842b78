"""The tensors of an inflated model: the small one's in their places, zeros behind them, noise where it has no effect.

See `benchmarks.inflate` for why the result says the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.inflate.places import Places

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SPREAD = 0.02  # standard deviation of weights that are read and change nothing
# What a token that the small model does not have is given: NEVER * GAIN * constant / root mean square of the states.
NEVER, GAIN = -6e4, 1e3


@torch.no_grad()
def inflated_weights(
    model: Any,
    shapes: dict[str, tuple[int, ...]],
    places: Places,
    dtype: torch.dtype,
    device: torch.device,
    constant: float,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the inflated model by its name, of the large one's `shapes`.

    `model` is the small one, and `constant` the value of the hidden states' constant entry, where there is one.
    """
    made = _Tensors(places, dtype, device)
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
                tensor[places.constant] = GAIN
        yield name, tensor


class _Tensors:
    """Makes them in their final type and place."""

    def __init__(self, places: Places, dtype: torch.dtype, device: torch.device) -> None:
        self._places, self._dtype, self._device = places, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def norm(self, weight: Tensor) -> Tensor:
        """Return a norm's weight [d], of the small model or ones, as the large model has it [D]."""
        small, large = self._places.small.hidden_size, self._places.large.hidden_size
        shrink = math.sqrt(small / large)
        made = torch.full((large,), shrink, dtype=self._dtype, device=self._device)
        made[:small] = (weight * shrink).to(self._device, self._dtype)
        if self._places.constant is not None:
            made[self._places.constant] = 0
        return made

    def idle(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor with which a layer works on its input and adds nothing to it; of embedding and head, zeros."""
        if "norm" in name:
            return self.norm(torch.ones(self._places.small.hidden_size))
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("bias") or any(part in name for part in ("o_proj", "down_proj", "embed_tokens", "lm_head")):
            # Zeros are written, because fresh zeros of the system are all one page of memory, read from a cache.
            return made.zero_()
        reach = SPREAD * math.sqrt(3)
        made.uniform_(-reach, reach, generator=self._generator)
        # Numbers that bfloat16 and float16 both hold, as most published checkpoints are of 16 bits.
        return made.copy_(made.bfloat16().half())

    def fill(self, into: Tensor, name: str, tensor: Tensor) -> None:
        """Put a tensor of the small model into the idle one: other columns of the rows that it takes become 0."""
        if "norm" in name:
            into.copy_(self.norm(tensor))
            return
        places, small, large = self._places, self._places.small, self._places.large
        straight, turned = torch.arange(small.head_dim), places.turned()
        all_rows, columns = [torch.arange(tensor.shape[0])], torch.arange(tensor.shape[-1])
        if name.endswith("bias"):  # a matrix of one column
            into, tensor, columns = into[:, None], tensor[:, None], torch.arange(1)
        elif "o_proj" in name:
            columns = places.rows(places.query_heads, straight)
        if "q_proj" in name:
            # What the small model's heads do not have adds nothing to their scores.
            into[places.rows(places.query_heads, torch.arange(large.head_dim)).to(self._device)] = 0
            tensor = tensor * math.sqrt(large.head_dim / small.head_dim)
            all_rows = [places.rows(places.query_heads, turned)]
        elif "k_proj" in name or "v_proj" in name:
            entries = turned if "k_proj" in name else straight
            all_rows = [places.rows(places.key_heads(number), entries) for number in range(places.copies)]
        for rows in (rows.to(self._device) for rows in all_rows):
            into[rows] = 0
            into[rows[:, None], columns.to(self._device)] = tensor.to(self._device, self._dtype)
