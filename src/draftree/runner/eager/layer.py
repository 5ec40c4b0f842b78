"""A decoder layer in tensor operations: first half, attention, second half.

It runs on any device in any dtype. `cpu.layers` has whole layers in C, for float32 and bfloat16 on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.runner.eager.parts import ACTIVATIONS, Norm, Parts, StockProduct, normed
from draftree.runner.masks import LayerKind
from draftree.runner.positions import Rotation


class Attention(NamedTuple):
    """The attention of a layer.

    Attributes:
        groups: query heads to a key/value head.
        scaling: of the scores.
        cap: soft cap of the scores; None for none.
    """

    groups: int
    scaling: float
    cap: float | None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of queries [B, kv, n, dim] under an additive mask."""
        if self.cap is None:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
        scores = self.cap * torch.tanh(query @ keys.mT * (self.scaling / self.cap))
        if mask is not None:
            scores = scores + mask
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def attend(layer: Any, x: Tensor, index: int, rows: Any, kind: LayerKind, cap: float | None) -> Tensor:
    """Run a layer: first half, attention, second half; may change and return x [B, n, d].

    `rows` has the angles and the attention that all layers of one segment share, see `SegmentRows`.
    """
    angles = rows.angles(kind)
    query, keys, values = layer.enter(x, angles, index)
    heads = Attention(layer.parts.heads.groups, layer.parts.scaling, cap)
    return layer.leave(x, rows.mix(heads, query, keys, values, kind), angles)


class Angles(NamedTuple):
    """Rotary angles of a segment's rows, and where their keys and values go.

    Attributes:
        cosine: [B, n, 1, dim].
        sine: [B, n, 1, dim], with the signs of the turn.
        cache: the slots, or what stands in for them; has `update`.
        rotation: which entries turn with which.
    """

    cosine: Tensor
    sine: Tensor
    cache: Any
    rotation: Rotation


class TensorLayer:
    """The two halves of a layer; `product` multiplies rows by weights."""

    def __init__(self, parts: Parts, product: type[StockProduct]) -> None:
        self.parts = parts
        self._qkv = product(parts.qkv)
        self._output = product([parts.output])
        self._gate_up = product(parts.gate_up)
        self._down = product([parts.down])
        self._activation = ACTIVATIONS[parts.activation]

    def enter(self, x: Tensor, angles: Angles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """From hidden states to queries, with keys and values put into the cache.

        Args:
            x: [B, n, d].
            angles: of the rows.
            index: the cache's layer.

        Returns:
            queries [B, kv, groups * n, dim], keys and values [B, kv, K, dim] with the context; of all slots where the
            cache of `angles` is `FixedSlots`.
        """
        query, key, value = self.project(x, angles)
        return query, *angles.cache.update(key, value, index)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, kv, groups * n, dim], keys and values [B, kv, n, dim] of the rows themselves."""
        batch, n, _ = x.shape
        kv, groups, dim = self.parts.heads
        queries = kv * groups
        qkv = self._qkv(normed(self.parts.norms[0], x)).view(batch, n, queries + 2 * kv, dim)
        qk = qkv[:, :, : queries + kv]
        if self.parts.head_norms is not None:
            query, key = qk[:, :, :queries], qk[:, :, queries:]
            if self.parts.wide:
                query, key = query.flatten(2), key.flatten(2)
            of_query, of_key = self.parts.head_norms
            query, key = of_query(query), of_key(key)
            qk = torch.cat([query.view(batch, n, queries, dim), key.view(batch, n, kv, dim)], 2)
        # OLMo's angles are float32 whatever the model's type; the others' are of its type.
        qk = torch.addcmul(qk * angles.cosine, angles.rotation.partners(qk), angles.sine).to(qkv.dtype)
        query = qk[:, :, :queries].view(batch, n, kv, groups, dim).permute(0, 2, 3, 1, 4)
        key, value = qk[:, :, queries:].transpose(1, 2), qkv[:, :, queries + kv :].transpose(1, 2)
        return query.reshape(batch, kv, groups * n, dim), key, value

    def leave(self, x: Tensor, mixed: Tensor, angles: Angles) -> Tensor:
        """From the attention's result [B, kv, groups * n, dim] to the layer's; may change and return x [B, n, d]."""
        behind_attention, behind_mlp = self.parts.behind
        x = x + normed(behind_attention, self._output(self.parts.heads.side_by_side(mixed)))
        gate, up = self._gate_up(normed(self.parts.norms[1], x)).chunk(2, -1)
        return x + normed(behind_mlp, self._down(self._activation(gate) * up))


class TensorHead:
    """Final norm and head, in tensor operations."""

    ROWS = 16  # rows of one product with the head on a CPU: its buffers grow with rows times vocabulary

    def __init__(self, norm: Norm, head: Any, product: type[StockProduct], cap: float | None = None) -> None:
        self._norm, self._cap = norm, cap
        self._head = product([head])

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, n, V] of hidden states [B, n, d]."""
        x = self._norm(x)
        rows = x.shape[0] * x.shape[1]
        if rows <= self.ROWS or not x.is_cpu:
            logits = self._head(x)
        else:
            parts = [self._head(part) for part in x.reshape(1, rows, -1).split(self.ROWS, 1)]
            logits = torch.cat(parts, 1).view(*x.shape[:2], -1)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)
