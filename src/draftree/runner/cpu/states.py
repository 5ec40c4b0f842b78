"""Recurrent states for compiled passes: what C reads of the context, keeps of the rows and moves at a commit.

The mathematics is in `native/recurrent.h`. Convolutions keep their inputs as [slots, kernel - 1, channels] here.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from ctypes import c_int64, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from draftree.native.structures import Delta, Moving, States, address, optional_address
from draftree.runner.eager.parts import Heads
from draftree.runner.kv.cache import rows_within
from draftree.runner.plan import Plan, Segment
from draftree.runner.recurrent.cache import RecurrentCache
from draftree.runner.weights.packed import LANES


def recurrent_floats(rows: int, width: int, dim: int) -> int:
    """Return the numbers of scratch that a thread needs for so many rows (`kernels.h`)."""
    return 4 * (rows + LANES) * (width + dim + LANES)


class CompiledDelta:
    """The weights of a stock Gated DeltaNet or short convolution beside its linears, as C reads them.

    Attributes:
        heads, width, dim: value heads, widths of a key (0 for a convolution alone) and of a value.
        kernel, channels: of the convolution.
    """

    def __init__(self, module: Any, heads: Heads) -> None:
        delta, conv = hasattr(module, "A_log"), module.conv1d if hasattr(module, "conv1d") else module.conv
        self.key_heads, self.heads, self.dim = heads.kv, heads.kv * heads.groups, heads.dim
        self.channels, _, self.kernel = conv.weight.shape
        self.width = int(module.head_k_dim) if delta else 0
        tensors = [conv.weight.detach()[:, 0].t(), conv.bias, None, None, None]
        if delta:
            tensors[2:] = -module.A_log.detach().float().exp(), module.dt_bias, module.norm.weight
        # Copies, as C keeps their addresses.
        self._held = [None if t is None else t.detach().to(torch.float32, copy=True).contiguous() for t in tensors]
        sizes = module.norm.variance_epsilon if delta else 0.0, self.kernel, self.width, self.channels
        self.described = Delta(*(optional_address(tensor, torch.float32) for tensor in self._held), *sizes)


class CompiledStates(RecurrentCache):
    """A `RecurrentCache` whose passes and commits run in C.

    Args:
        layers: by number, the compiled layers.
        threads: function of a number of multiplications.
    """

    def __init__(self, library: ctypes.CDLL, layers: Any, threads: Any, *given: Any) -> None:
        super().__init__(*given)
        self._library, self._layers, self._threads = library, layers, threads
        self._rows: dict[int, tuple[States, list[Tensor | None]]] = {}  # of the open pass, by layer
        self._offsets: dict[int, list[int]] = {}  # of each request's rows, by layer

    def begin(self, plan: Plan, segments: list[Segment]) -> AbstractContextManager[None]:
        """See `RecurrentCache.begin`; a single row is a tree."""
        context = super().begin(plan, segments)
        self._recurrent.trees = not plan.prompt
        self._rows, self._offsets = {}, {}
        return context

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """Note the last inputs of a prompt with images, which the model's own `forward` reads, in the form of C."""
        inputs = super().update_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size)
        kept = self._recurrent.conv[layer_idx, state_idx]
        self._recurrent.conv[layer_idx, state_idx] = kept[:, :, 1:].transpose(1, 2)
        return inputs

    def describe(self, layer: int, offsets: list[int]) -> States:
        """Return what C reads and writes in a recurrent layer; `offsets` of requests' rows end with their number."""
        delta, rows, f32 = self._layers[layer].delta, offsets[-1], torch.float32
        conv, states = self._stores(layer)
        stride = self._layers[layer].described.qkv.stride
        made: list[Tensor | None] = [None] * 6
        if self._recurrent.trees:
            sizes: list[tuple[int, ...]] = [(rows, stride)]
            if delta.width:
                sizes += [(delta.key_heads, rows, delta.width), (delta.heads, rows, delta.dim), (delta.heads, rows)]
            made[: len(sizes)] = (torch.empty(size, dtype=f32, device="cpu") for size in sizes)
        else:
            self._recurrent.conv[layer, 0] = made[4] = torch.empty_like(conv[:1])
            if states is not None:
                self._recurrent.states[layer, 0] = made[5] = torch.empty_like(states[:1])
        at = (None if tensor is None else address(tensor, f32) for tensor in made)
        described = States(address(conv, f32), optional_address(states, f32), rows, *at)
        self._rows[layer], self._offsets[layer] = (described, made), offsets
        return described

    @torch.inference_mode(False)
    def _stores(self, layer: int) -> tuple[Tensor, Tensor | None]:
        delta, key, f32 = self._layers[layer].delta, (layer, 0), torch.float32
        if key not in self.conv:
            self.conv[key] = torch.zeros(self.slots, delta.kernel - 1, delta.channels, dtype=f32, device="cpu")
        if key not in self.states and delta.width:
            self.states[key] = torch.zeros(self.slots, delta.heads, delta.width, delta.dim, dtype=f32, device="cpu")
        return self.conv[key], self.states.get(key)

    def _replay(self, rows: list[list[int]], segments: list[Segment]) -> None:
        ends = [segment.start for segment in segments[1:]] + [len(self._layers)]
        for segment, end in zip(segments, ends, strict=True):
            local = rows_within(segment, rows)
            layers = [layer for layer in self._rows if segment.start <= layer < end]
            if layers and any(local):
                self._move_states(layers, local)

    def _move_states(self, layers: list[int], paths: list[list[int]]) -> None:
        delta, count, batch = self._layers[layers[0]].delta, sum(map(len, paths)), len(paths)
        offsets = self._offsets[layers[0]]
        begins = (c_int64 * (batch + 1))(0, *accumulate(map(len, paths)))
        rows = (c_int64 * count)(*(at + row for at, path in zip(offsets, paths, strict=False) for row in path))
        threads = self._threads(len(layers) * (count + batch) * delta.heads * delta.width * delta.dim)
        floats = recurrent_floats(max(map(len, paths)), delta.width, delta.dim)
        scratch = torch.empty(threads * floats, dtype=torch.float32, device="cpu")
        of_layers = (c_void_p * len(layers))(*(ctypes.addressof(self._layers[i].described) for i in layers))
        of_states = (c_void_p * len(layers))(*(ctypes.addressof(self._rows[i][0]) for i in layers))
        moving = Moving(
            *(ctypes.addressof(of_layers), ctypes.addressof(of_states), batch, self._pass.first),
            *(ctypes.addressof(begins), ctypes.addressof(rows), address(scratch, torch.float32), floats),
        )
        self._library.states_move(moving, len(layers), threads)
