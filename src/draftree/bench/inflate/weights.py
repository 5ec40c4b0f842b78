"""The tensors of an inflated model: the small one's in their places, zeros behind them, noise where it has no effect.

See `draftree.bench.inflate` for why the result says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftree.bench.inflate.places import Places

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
    """Every tensor of the inflated model by its name.

    Args:
        model: the small one.
        shapes: of the large one's parameters.
        places: of the small one's parts.
        dtype: of the tensors.
        device: where they are made.
        constant: value of the hidden states' constant entry, where there is one.
    """
    made = _Tensors(places, dtype, device)
    small, large = places.small, places.large
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    vocabulary = torch.arange(small.vocab_size)
    embedding, head = (made.zeros(large.vocab_size, large.hidden_size) for _ in range(2))
    made.put(embedding, state["model.embed_tokens.weight"], vocabulary)
    made.put(head, state.get("lm_head.weight", state["model.embed_tokens.weight"]), vocabulary)
    last = made.norm(state["model.norm.weight"])
    if places.constant is not None:
        embedding[:, places.constant], last[places.constant] = constant, GAIN
        head[small.vocab_size :, places.constant] = NEVER
    yield from (("model.embed_tokens.weight", embedding), ("lm_head.weight", head), ("model.norm.weight", last))
    held = {places.layer(i): i for i in range(small.layers)}
    for index in range(large.layers):
        prefix = f"model.layers.{index}."
        layer = {name: made.idle(name, shape) for name, shape in shapes.items() if name.startswith(prefix)}
        if index in held:
            old = f"model.layers.{held[index]}."
            for name, tensor in state.items():
                if name.startswith(old):
                    made.fill(layer[prefix + name[len(old) :]], name, tensor)
        yield from layer.items()


class _Tensors:
    """Makes them in their final type and place."""

    def __init__(self, places: Places, dtype: torch.dtype, device: torch.device) -> None:
        self._places, self._dtype, self._device = places, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def noise(self, *shape: int) -> Tensor:
        reach = SPREAD * math.sqrt(3)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.uniform_(-reach, reach, generator=self._generator)

    def zeros(self, *shape: int) -> Tensor:
        # Zeros are written, because fresh zeros of the system are all one page of memory, which is read from a cache.
        return torch.empty(shape, dtype=self._dtype, device=self._device).zero_()

    def norm(self, weight: Tensor) -> Tensor:
        """A norm's weight [d], of the small model or ones, as the large model has it [D]."""
        small, large = self._places.small.hidden_size, self._places.large.hidden_size
        shrink = math.sqrt(small / large)
        made = torch.full((large,), shrink, dtype=self._dtype, device=self._device)
        made[:small] = (weight * shrink).to(self._device, self._dtype)
        if self._places.constant is not None:
            made[self._places.constant] = 0
        return made

    def idle(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A layer's tensor, where the layer works on its input and adds nothing to it."""
        if "layernorm" in name:
            return self.norm(torch.ones(self._places.small.hidden_size))
        if name.endswith("bias") or "o_proj" in name or "down_proj" in name:
            return self.zeros(*shape)
        return self.noise(*shape)

    def put(self, into: Tensor, small: Tensor, rows: Tensor, columns: Tensor | None = None) -> None:
        """Write `small` into those rows of `into`, at those columns or the first; their other columns become 0."""
        rows = rows.to(self._device)
        into[rows] = 0
        if columns is None:
            columns = torch.arange(small.shape[1])
        into[rows[:, None], columns.to(self._device)] = small.to(self._device, self._dtype)

    def fill(self, into: Tensor, name: str, tensor: Tensor) -> None:
        """Put a layer's tensor of the small model into the idle one."""
        if "layernorm" in name:
            into.copy_(self.norm(tensor))
            return
        places, small, large = self._places, self._places.small, self._places.large
        straight = torch.arange(small.head_dim)
        rows, columns = torch.arange(tensor.shape[0]), None
        if name.endswith("bias"):  # a matrix of one column
            into, tensor = into[:, None], tensor[:, None]
        elif "o_proj" in name:
            columns = places.queries(straight)
        if "q_proj" in name:
            # What the small model's heads do not have adds nothing to their scores.
            into[places.queries(torch.arange(large.head_dim)).to(self._device)] = 0
            tensor = tensor * math.sqrt(large.head_dim / small.head_dim)
            rows = places.queries(places.turned())
        elif "k_proj" in name or "v_proj" in name:
            entries = places.turned() if "k_proj" in name else straight
            for number in range(places.copies):
                first = torch.tensor(places.keys(number))[:, None] * large.head_dim
                self.put(into, tensor, (first + entries).flatten())
            return
        self.put(into, tensor, rows, columns)
