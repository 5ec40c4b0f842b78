"""A llama-shaped decoder layer in two halves, before and after its attention, in tensor operations.

Any device and dtype. `compiled` has the same halves as one C call each, for float32 on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.host.cache import SlotCache
from draftree.host.product import Product


class Heads(NamedTuple):
    """Attention heads of a layer.

    Attributes:
        kv: key/value heads.
        groups: query heads to each of them.
        dim: width of a head.
    """

    kv: int
    groups: int
    dim: int


class Norm(NamedTuple):
    """A root-mean-square norm: its weight [d] and epsilon."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """The norm of a stock module."""
        return cls(module.weight.detach(), float(module.variance_epsilon))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] scaled to a mean square of 1, times the weight."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), *self)
        # On a CPU torch's own takes eleven operations; this takes six.
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return x * squares.div_(x.shape[-1]).add_(self.epsilon).rsqrt_() * self.weight


class Parts(NamedTuple):
    """What a stock layer is made of, for either form of it.

    Attributes:
        heads: of its attention.
        norms: before attention and before the MLP.
        head_norms: on every query and every key head, or None.
        attention, mlp: stock modules that hold the projections.
    """

    heads: Heads
    norms: tuple[Norm, Norm]
    head_norms: tuple[Norm, Norm] | None
    attention: Any
    mlp: Any

    @classmethod
    def of(cls, layer: Any, config: Any) -> Parts:
        """The parts of a stock decoder layer."""
        attention = layer.self_attn
        kv = int(config.num_key_value_heads)
        heads = Heads(kv, int(config.num_attention_heads) // kv, int(attention.head_dim))
        norms = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        head_norms = None
        if getattr(attention, "q_norm", None) is not None:
            head_norms = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
        return cls(heads, norms, head_norms, attention, layer.mlp)

    def products(self) -> list[list[Any]]:
        """The linears, those on the same input together: query, key and value; output; gate; up; down."""
        a, m = self.attention, self.mlp
        return [[a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [m.gate_proj], [m.up_proj], [m.down_proj]]


class Angles(NamedTuple):
    """Rotary angles of a segment's rows, and where their keys and values go.

    Attributes:
        cosine: [B, n, 1, dim].
        sine: [B, n, 1, dim], its first half negated, so that rotating halves is a plain roll.
        cache: the slots.
    """

    cosine: Tensor
    sine: Tensor
    cache: SlotCache


class TensorLayer:
    """See the module; `copy` as in `Product`."""

    def __init__(self, parts: Parts, copy: bool) -> None:
        self.parts = parts
        attention, mlp = parts.attention, parts.mlp
        self._qkv = Product([attention.q_proj, attention.k_proj, attention.v_proj], copy)
        self._output = Product([attention.o_proj], copy)
        self._gate_up = Product([mlp.gate_proj, mlp.up_proj], copy)
        self._down = Product([mlp.down_proj], copy)

    def enter(self, x: Tensor, angles: Angles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """From hidden states to queries, with keys and values put into the cache.

        Args:
            x: [B, n, d].
            angles: of the rows.
            index: the cache's layer.

        Returns:
            queries [B, kv, groups * n, dim], keys and values [B, kv, K, dim] with the context.
        """
        batch, n, _ = x.shape
        kv, groups, dim = self.parts.heads
        queries = kv * groups
        qkv = self._qkv(self.parts.norms[0](x)).view(batch, n, queries + 2 * kv, dim)
        qk = qkv[:, :, : queries + kv]
        if self.parts.head_norms is not None:
            of_query, of_key = self.parts.head_norms
            qk = torch.cat([of_query(qk[:, :, :queries]), of_key(qk[:, :, queries:])], 2)
        qk = torch.addcmul(qk * angles.cosine, qk.roll(dim // 2, -1), angles.sine)
        keys, values = angles.cache.update(
            qk[:, :, queries:].transpose(1, 2), qkv[:, :, queries + kv :].transpose(1, 2), index
        )
        query = qk[:, :, :queries].view(batch, n, kv, groups, dim).permute(0, 2, 3, 1, 4)
        return query.reshape(batch, kv, groups * n, dim), keys, values

    def leave(self, x: Tensor, mixed: Tensor, angles: Angles) -> Tensor:
        """From the attention's result [B, kv, groups * n, dim] to the layer's; may change and return x [B, n, d]."""
        batch, n, _ = x.shape
        kv, groups, dim = self.parts.heads
        mixed = mixed.view(batch, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, kv * groups * dim)
        x = x + self._output(mixed)
        gate, up = self._gate_up(self.parts.norms[1](x)).chunk(2, -1)
        return x + self._down(F.silu(gate) * up)


class TensorHead:
    """Final norm and head, in tensor operations."""

    ROWS = 16  # rows of one product with the head: its buffers grow with rows times vocabulary

    def __init__(self, norm: Norm, head: Any, copy: bool) -> None:
        self._norm = norm
        self._head = Product([head], copy)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, n, V] of hidden states [B, n, d]."""
        x = self._norm(x)
        rows = x.shape[0] * x.shape[1]
        if rows <= self.ROWS:
            return self._head(x)
        flat = x.reshape(1, rows, -1)
        parts = [self._head(part) for part in flat.split(self.ROWS, 1)]
        return torch.cat(parts, 1).view(*x.shape[:2], -1)
