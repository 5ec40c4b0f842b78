"""Decoder layers of published drafters: stock projections and norms, with attention over a request's own states.

The rows of all requests pass through products and norms together. Only attention looks at other rows, so it is done
for each request by itself: no padding, and no slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
ATTENTION: dict[str, Any] = {"llama": modeling_llama.LlamaAttention, "qwen3": modeling_qwen3.Qwen3Attention}
NORMS = modeling_llama.LlamaRMSNorm, modeling_qwen3.Qwen3RMSNorm
BLOCK = 256  # States grow by so many rows.

Angles = tuple[Tensor, Tensor]  # cosines and sines, each [1, R, head dim]


class Grown:
    """A tensor that grows along its first dimension."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def put(self, start: int, rows: Tensor) -> None:
        """Write rows [n, ...] from `start` on."""
        end = start + len(rows)
        held = self._held
        if held is None or len(held) < end:
            size = max(end, 2 * (0 if held is None else len(held)))
            with torch.inference_mode(False):  # for passes of either mode
                self._held = rows.new_empty(-(-size // BLOCK) * BLOCK, *rows.shape[1:])
            if held is not None:
                self._held[:start] = held[:start]
        assert self._held is not None
        self._held[start:end] = rows

    def upto(self, end: int) -> Tensor:
        """Return the first `end` rows."""
        assert self._held is not None
        return self._held[:end]

    def copied(self, end: int) -> Grown:
        """Return a copy of the first `end` rows."""
        made = Grown()
        made.put(0, self.upto(end))
        return made


@dataclass(slots=True)
class States:
    """A request's keys and values in each layer: those of certain rows, then those of draft rows."""

    keys: dict[int, Grown] = field(default_factory=dict)
    values: dict[int, Grown] = field(default_factory=dict)

    def put(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, heads, dim] of the rows from `start` on."""
        self.keys.setdefault(layer, Grown()).put(start, keys)
        self.values.setdefault(layer, Grown()).put(start, values)

    def copied(self, end: int) -> States:
        """Return a copy of the first `end` rows."""
        copies = [{n: grown.copied(end) for n, grown in held.items()} for held in (self.keys, self.values)]
        return States(*copies)

    def attend(self, layer: int, queries: Tensor, end: int, sees: Tensor | None, scaling: float) -> Tensor:
        """Return what `queries` [n, heads, dim] find among the first `end` rows, [n, heads, dim].

        `sees` is BoolTensor [n, end]; None for all of them.
        """
        keys, values = self.keys[layer].upto(end).transpose(0, 1), self.values[layer].upto(end).transpose(0, 1)
        grouped = queries.transpose(0, 1)[None], keys[None], values[None]
        mixed = F.scaled_dot_product_attention(*grouped, sees, scale=scaling, enable_gqa=True)
        return mixed[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one request among the rows of a pass.

    Attributes:
        states: of the request.
        start: where its rows are written.
        count: how many rows it has.
        sees: BoolTensor [count, start + count], which rows they see; None for all.
        drafts: rows right before them that not all of them see.
    """

    states: Any
    start: int
    count: int
    sees: Tensor | None
    drafts: int = 0


def causal(start: int, count: int, device: torch.device) -> Tensor | None:
    """Return which of the first `start + count` rows the last `count` see as a text; None where a row sees all."""
    if count == 1:
        return None
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)


def turned(heads: Tensor, angles: Angles) -> Tensor:
    """Turn heads [R, heads, dim] by rotary angles, whose width may be less than theirs."""
    cos, sin = (part[0][:, None] for part in angles)
    width = cos.shape[-1]
    x, rest = heads[..., :width], heads[..., width:]
    one, other = x.chunk(2, -1)
    return torch.cat([x * cos + torch.cat([-other, one], -1) * sin, rest], -1)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    """Return a linear without memory, for weights of a file."""
    return nn.Linear(inputs, outputs, bias, dtype=torch.float32, device="meta")


class Attention(nn.Module):
    """A stock attention's weights: q_proj, k_proj, v_proj, o_proj, and q_norm and k_norm where the family has them.

    Args:
        config: of the layer.
        inputs: width of what the projections read.
    """

    def __init__(self, config: Any, inputs: int) -> None:
        super().__init__()
        stock = ATTENTION[config.model_type](config, 0)
        self.scaling, self.dim = float(stock.scaling), int(stock.head_dim)
        for name, module in stock.named_children():
            if name in ("q_proj", "k_proj", "v_proj") and inputs != config.hidden_size:
                module = linear(inputs, module.out_features, bias=module.bias is not None)
            self.add_module(name, module)

    def heads(self, name: str, x: Tensor) -> Tensor:
        """Return queries ("q"), keys ("k") or values ("v") of rows [R, inputs], as [R, heads, dim] before rotation."""
        made: Tensor = getattr(self, f"{name}_proj")(x)
        made = made.view(len(x), -1, self.dim)
        norm = getattr(self, f"{name}_norm", None)
        return made if norm is None else norm(made)

    def forward(self, layer: int, x: Tensor, angles: Angles, spans: Sequence[Span]) -> Tensor:
        """Write the keys and values of rows [R, inputs] into their states, and attend; return [R, hidden]."""
        queries, keys = (turned(self.heads(name, x), angles) for name in "qk")
        values, begin, mixed = self.heads("v", x), 0, []
        for span in spans:
            own = slice(begin, begin + span.count)
            span.states.put(layer, span.start, keys[own], values[own])
            end = span.start + span.count
            mixed.append(span.states.attend(layer, queries[own], end, span.sees, self.scaling))
            begin += span.count
        project: Any = self.o_proj
        out: Tensor = project(torch.cat(mixed).flatten(1))
        return out


class Head(nn.Module):
    """The base of heads: weights by the names of their files, on the meta device until these are read.

    Args:
        width: of the head's rows.
        vocab_size, draft_vocab_size: token ids of the target and of the head.
        own: tables that the head has, and does not share with the target: "embed_tokens", "lm_head".
    """

    def __init__(self, width: int, vocab_size: int, draft_vocab_size: int, own: Collection[str]) -> None:
        super().__init__()
        self.embed_tokens = self.lm_head = None
        if "embed_tokens" in own:
            self.embed_tokens = nn.Embedding(vocab_size, width, dtype=torch.float32, device="meta")
        if "lm_head" in own:
            self.lm_head = linear(width, draft_vocab_size)


def stock_parts(config: Any) -> tuple[Any, Any, Any]:
    """Return the family's MLP, and a function that makes a norm of a width (the config's by default), and its rope."""
    source = modeling_llama if config.model_type == "llama" else modeling_qwen3
    name = "Llama" if config.model_type == "llama" else "Qwen3"
    norm = getattr(source, f"{name}RMSNorm")

    def norm_of(width: int = config.hidden_size) -> nn.Module:
        made: nn.Module = norm(width, eps=config.rms_norm_eps)
        return made

    return getattr(source, f"{name}MLP")(config), norm_of, getattr(source, f"{name}RotaryEmbedding")
