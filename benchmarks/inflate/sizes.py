"""Sizes of llama-shaped models: those of well-known ones by name, and one for any number of parameters.

An inflated model takes its cost from here and its text from a small model; see `benchmarks.inflate`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftree.checkpoints import free_bytes
from draftree.errors import did_you_mean

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
DTYPES = ("float32", "bfloat16", "float16")
RECURRENT = 128  # width of recurrent heads
ROUND = 32  # widths of MLPs are multiples of it
OVER = 1.05  # how far the parameters of a size may exceed the given number


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers that decide what a model costs: shaped as a llama, or with recurrent layers as Qwen 3.5."""

    hidden_size: int  # width of the residual stream
    layers: int  # decoder layers
    heads: int  # query heads of a layer
    kv_heads: int  # key/value heads, a divisor of `heads`
    head_dim: int  # width of a head, even
    intermediate_size: int  # units of an MLP
    vocab_size: int  # rows of the embedding, and of the head
    # Of a gated delta rule; 0 in other models.
    recurrent: int = 0  # how many of the layers have one in attention's place
    key_heads: int = 0
    value_heads: int = 0  # a multiple of `key_heads`
    key_width: int = 0  # of a head
    value_width: int = 0
    kernel: int = 0  # of the convolution

    @classmethod
    def of(cls, config: Any) -> Size:
        """Return the size in a Hugging Face config."""
        c = config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        numbers = (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, head_dim)
        recurrent = (getattr(c, "layer_types", None) or ()).count("linear_attention")
        delta = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim) if recurrent else ()
        delta += (c.linear_value_head_dim, c.linear_conv_kernel_dim) if recurrent else ()
        return cls(*map(int, (*numbers, c.intermediate_size, c.vocab_size, recurrent, *delta)))

    @property
    def groups(self) -> int:
        """Return query heads to a key/value head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Return the number of parameters with an untied head and no biases."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        if self.recurrent:  # Gates beside the queries, and a norm for queries and one for keys.
            attention += self.hidden_size * self.heads * self.head_dim + 2 * self.head_dim
        mixers = (self.layers - self.recurrent) * attention + self.recurrent * self._delta
        layer = 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return mixers + self.layers * layer + 2 * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def _delta(self) -> int:
        """The parameters of a gated delta rule."""
        channels = 2 * self.key_heads * self.key_width + self.value_heads * self.value_width
        rows = channels + 2 * self.value_heads * (self.value_width + 1)  # the output's and two gates beside them
        return rows * self.hidden_size + channels * self.kernel + 2 * self.value_heads + self.value_width


# As their public configurations say.
SIZES = {
    "smollm2-360m": Size(960, 32, 15, 5, 64, 2560, 49152),
    "tinyllama-1.1b": Size(2048, 22, 32, 4, 64, 5632, 32000),
    "llama-3.2-1b": Size(2048, 16, 32, 8, 64, 8192, 128256),
    "llama-7b": Size(4096, 32, 32, 32, 128, 11008, 32000),
    "llama-3-8b": Size(4096, 32, 32, 8, 128, 14336, 128256),
    "llama-13b": Size(5120, 40, 40, 40, 128, 13824, 32000),
}


def size_named(name: str) -> Size:
    """Return the size called `name`; raise a ValueError if there is none."""
    if name not in SIZES:
        raise ValueError(f"There is no shape {name!r}: choose one of {', '.join(SIZES)}.{did_you_mean(name, SIZES)}")
    return SIZES[name]


def parameters_named(text: str) -> int:
    """Return the number of "400M", "1.3B" or "50000000"; raise a ValueError for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no number of parameters: write one such as 400M or 1.3B.")
    return round(float(match[1]) * UNITS[match[2]])


def dtype_named(name: str) -> torch.dtype:
    """Return the type of weights called `name`; raise a ValueError if there is none."""
    if name not in DTYPES:
        raise ValueError(f"There is no dtype {name!r} here: choose {', '.join(DTYPES)}.")
    return getattr(torch, name)


def check_memory(size: Size, dtype: torch.dtype, device: torch.device, room: int = 0) -> None:
    """Raise a ValueError for a size whose weights, and `room` bytes more, do not fit into the free memory."""
    need, free = size.parameters * dtype.itemsize + room, free_bytes(device)
    if free is not None and need > free:
        raise ValueError(
            f"The inflated model takes {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: inflate to a "
            "smaller size, or give another dtype or device."
        )


def size_for(parameters: int, small: Size) -> Size:
    """Return a size of about so many parameters, in the proportions of public models; vocabulary and groups of `small`.

    24 layers at 400M and 32 at 7B; heads 64 wide, from 1B on 128, rounded up to a multiple of the small model's (whose
    rotary angles are then among the large one's to the last bit). Recurrent heads are 128 wide and together as wide as
    the model. The MLP's width makes up what is missing.

    Raises:
        ValueError: fewer than the smallest of these sizes has.
    """
    layers = max(small.layers, small.layers * round(24 * (parameters / 4e8) ** 0.1 / small.layers))
    usual = 64 if parameters < 10**9 else 128
    dim = small.head_dim * math.ceil(usual / small.head_dim)
    # With kv heads = heads / groups and an MLP of 8/3 the width, a layer has this many squares of the width.
    attention, recurrent = 2 + 2 / small.groups, layers * small.recurrent // small.layers
    squares = layers * (attention + 8) + (layers + recurrent * (4 - attention) if recurrent else 0)
    width = (math.sqrt(small.vocab_size**2 + squares * parameters) - small.vocab_size) / squares
    per_step = small.groups * dim
    heads = max(small.heads, small.groups * max(1, round(width / per_step)))
    heads = max(heads, small.groups * math.ceil((small.hidden_size + 1) / per_step))
    bare = Size(heads * dim, layers, heads, heads // small.groups, dim, 0, small.vocab_size)
    if recurrent:
        key, value = (max(RECURRENT, width) for width in (small.key_width, small.value_width))
        count = max(small.key_heads, round(bare.hidden_size / key))
        bare = replace(bare, recurrent=recurrent, kernel=small.kernel, key_width=key, value_width=value)
        bare = replace(bare, key_heads=count, value_heads=count * small.value_heads // small.key_heads)
    units = (parameters - bare.parameters) / (3 * bare.hidden_size * layers)
    intermediate = max(small.intermediate_size, ROUND * round(units / ROUND))
    size = replace(bare, intermediate_size=intermediate)
    if size.parameters > OVER * parameters:
        raise ValueError(
            f"{parameters:,} parameters are too few to hold this model of {small.parameters:,} in the proportions of "
            f"larger ones: give {math.ceil(size.parameters / 10**6)}M or more, or a shape."
        )
    return size
