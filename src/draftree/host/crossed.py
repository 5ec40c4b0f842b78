"""Runs ahead for decoders that attend to a source: T5 and mT5 in float32 on a CPU.

A stock pass of such a small model takes a millisecond, nearly all of it overhead of tensor operations; compiled
(`_crossed.h`) a step takes a few hundredths of that. Keys and values lie in the same caches, so passes and runs may
follow each other in any order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from draftree.host.ahead import Course, Scratch, _Ahead, go, prepared
from draftree.host.cache import SlotCache
from draftree.host.compiled import WORTH_THREADS, _Pass
from draftree.host.encoder import EncoderState
from draftree.host.panels import Matrix, Packed, PackedLinear
from draftree.host.probe import probe
from draftree.host.product import may_copy
from draftree.host.target import Target

FAMILIES = ("t5", "mt5")  # umT5 has a bias in every layer


class _CrossLayer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "query", "crossed", "up", "gate", "down")),
        *((name, c_void_p) for name in ("norm", "cross_norm", "mlp_norm", "keys", "values")),
    )


class _Cross(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "bias", "seen", "lengths")),
        *((name, c_int64) for name in ("count", "hidden", "heads", "dim", "inner", "columns", "distances")),
        ("epsilon", c_float),
        ("scores", c_void_p),
    )


class CrossRunner:
    """The decoder of a T5 in panels.

    Args:
        library: the compiled functions.
        target: the model; see `cross_runner_of` for which.
    """

    def __init__(self, library: ctypes.CDLL, target: Target) -> None:
        self._library, self._scratch = prepared(library), Scratch()
        layers: list[Any] = target.layers
        self._kept: list[Any] = []
        self._layers = (_CrossLayer * len(layers))(*(self._described(layer) for layer in layers))
        attention = layers[0].layer[0].SelfAttention
        self._heads, self._dim, self._hidden = attention.n_heads, attention.key_value_proj_dim, target.hidden_size
        self._inner = int(self._layers[0].down.inputs)
        self._bias = _bias_by_distance(attention)
        closing: Any = target.decoder.final_layer_norm
        self._epsilon = float(closing.variance_epsilon)
        # What a tied head multiplies its input by is as good in the norm before it.
        self._norm = (closing.weight.detach() * probe(target).scale).contiguous()
        self._head = Packed([target.model.get_output_embeddings()])
        self._embedding = target.decoder.get_input_embeddings().weight.detach()
        self._weights = sum(p.numel() for p in target.decoder.parameters()) - self._embedding.numel()

    def _described(self, layer: Any) -> _CrossLayer:
        own, cross, mlp = layer.layer[0], layer.layer[1], layer.layer[2]
        text, source, dense = own.SelfAttention, cross.EncDecAttention, mlp.DenseReluDense
        gated = hasattr(dense, "wi_0")
        packed = [Packed(m) for m in ([text.q, text.k, text.v], [text.o], [source.q], [source.o])]
        packed += [Packed([m]) for m in ([dense.wi_1, dense.wi_0] if gated else [dense.wi])]
        down = Packed([dense.wo])
        self._kept += [*packed, down]
        matrices = [p.described for p in packed] + ([] if gated else [Matrix()])
        norms = [part.layer_norm.weight for part in (own, cross, mlp)]
        return _CrossLayer(*matrices, down.described, *(norm.data_ptr() for norm in norms), None, None)

    def run(
        self,
        cache: SlotCache,
        encoder: EncoderState,
        positions: Sequence[int],
        given: Sequence[Sequence[int]],
        steps: int,
        best: int,
        least: float,
        each: float,
        ends: Sequence[int],
        taking_part: Sequence[bool],
    ) -> Course:
        """See `Host.run_ahead`; `cache` is open for requests and steps."""
        batch, first = len(given), cache.first
        keys, values, seen = encoder.stores()
        for layer, key, value in zip(self._layers, keys, values, strict=True):
            layer.keys, layer.values = key.data_ptr(), value.data_ptr()
        width, vocabulary, starts = self._heads * self._dim, self._head.described.outputs, cache.starts
        threads = torch.get_num_threads() if batch * self._weights > WORTH_THREADS else 1
        scratch = batch * (self._hidden + max(4 * width, 2 * self._inner))
        scores = max(max(starts) + steps, seen.shape[1])
        at = self._scratch.floats(scratch + scores + batch * (2 * self._hidden + vocabulary))
        p = _Pass(
            *(batch, 1, first, cache.capacity, (c_int64 * batch)(*starts), None, None, at, threads, 0, 0),
            *(None, None, None),
        )
        lengths = (c_int64 * batch)(*encoder.lengths[first : first + batch])
        cross = _Cross(
            *(ctypes.addressof(self._layers), self._bias.data_ptr(), seen.data_ptr(), ctypes.addressof(lengths)),
            *(len(self._layers), self._hidden, self._heads, self._dim, self._inner, seen.shape[1]),
            *(self._bias.shape[1], self._epsilon, at + 4 * scratch),
        )
        like = self._embedding
        stores = [cache.stores(i, self._heads, (self._dim, self._dim), like) for i in range(len(self._layers))]
        own_keys = (c_void_p * len(stores))(*(k.data_ptr() for k, _ in stores))
        own_values = (c_void_p * len(stores))(*(v.data_ptr() for _, v in stores))
        stops = (c_int64 * max(len(ends), 1))(*ends)
        ahead = _Ahead(
            *(None, ctypes.addressof(own_keys), ctypes.addressof(own_values), len(stores)),
            *(like.data_ptr(), self._norm.data_ptr(), None, None, ctypes.addressof(self._head.described)),
            *(ctypes.addressof(stops), len(ends), max(positions) + steps, best, self._epsilon, least, each),
            ctypes.addressof(cross),
        )
        return go(self._library, ahead, p, positions, given, steps, best, taking_part, at + 4 * (scratch + scores))


def _bias_by_distance(attention: Any) -> Tensor:
    """[heads, distances]: what is added to scores of columns so many tokens back; the last holds for all further."""
    distance = torch.arange(attention.relative_attention_max_distance + 1)
    bucket = attention._relative_position_bucket(
        -distance,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return attention.relative_attention_bias.weight.detach()[bucket].t().contiguous()


def cross_runner_of(library: Any, target: Target) -> CrossRunner | None:
    """A runner where the model is a stock T5 or mT5 that the compiled functions can drive, else None."""
    if library is None or target.model_type not in FAMILIES or not target.encoder_decoder:
        return None
    if target.dtype != torch.float32 or any(not p.is_cpu for p in target.model.parameters()):
        return None
    if not may_copy(target.model, target.device, compiled=True):
        return None
    head = target.model.get_output_embeddings()
    for module in (*target.decoder.modules(), head):
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return None
        if not type(module).__module__.startswith(("torch.nn.", "transformers.")):
            return None
        if "Linear" in type(module).__name__ and type(module) not in (nn.Linear, PackedLinear):
            return None
    config = target.config
    if config.dense_act_fn not in ("relu", "gelu_new") or (config.dense_act_fn == "gelu_new") != config.is_gated_act:
        return None
    embedding = target.decoder.get_input_embeddings()
    return CrossRunner(library, target) if embedding.weight.is_contiguous() else None
