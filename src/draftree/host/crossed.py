"""The loop host of encoder-decoders: the decoders of T5 and mT5 in float32 on a CPU, compiled.

A stock pass of a small one is mostly overhead of tensor operations; compiled (`_crossed.h`) it takes a fraction of the
time, and several steps ahead go in one call. Passes with anything special in them (rows that join, leave or are tapped)
go through the stock `forward`, over the same caches. The encoder, which runs once a request, always does.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from draftree.host.ahead import AheadPlan, Course, Scratch, _Ahead, go, prepared
from draftree.host.cache import SlotCache
from draftree.host.compiled import ABI, WORTH_THREADS, _Pass, load_library
from draftree.host.encoder import EncoderState
from draftree.host.hooked import HookedHost
from draftree.host.panels import Matrix, Packed, PackedLinear
from draftree.host.plan import PassResult, Plan, Segment
from draftree.host.probe import probe
from draftree.host.product import may_copy
from draftree.host.target import Target

FAMILIES = ("t5", "mt5")  # umT5 has a bias in every layer
ACTIVATIONS = (("relu", False), ("gelu_new", True))  # with a gate or without


class _CrossLayer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "query", "crossed", "up", "gate", "down")),
        *((name, c_void_p) for name in ("norm", "cross_norm", "mlp_norm", "keys", "values")),
    )


class _Cross(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "bias", "seen", "lengths", "places")),
        *((name, c_int64) for name in ("count", "hidden", "heads", "dim", "inner", "columns", "distances")),
        ("epsilon", c_float),
        ("longest", c_int64),
        *((name, c_void_p) for name in ("scores", "distance")),
    )


class CrossHost(HookedHost):
    """Drives stock T5 and mT5 models; see `Host`."""

    name = "loop"

    @staticmethod
    def qualifies(target: Target) -> bool:
        """Whether the model is a T5 or mT5 in its stock state that the compiled functions can drive."""
        if not target.encoder_decoder or target.model_type not in FAMILIES or load_library() is None:
            return False
        if (target.config.dense_act_fn, bool(target.config.is_gated_act)) not in ACTIVATIONS:
            return False
        model = target.model
        if target.dtype != torch.float32 or not all(p.is_cpu and p.dtype == torch.float32 for p in model.parameters()):
            return False
        for module in (*target.decoder.modules(), model.get_output_embeddings(), model):
            if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
                return False
            if not type(module).__module__.startswith(("torch.nn.", "transformers.", "draftree.host.panels")):
                return False
        layers: list[Any] = target.layers
        if not all(
            type(m) in (nn.Linear, PackedLinear) for layer in layers for group in _linears(layer) for m in group
        ):
            return False
        contiguous = target.decoder.get_input_embeddings().weight.is_contiguous()
        return contiguous and may_copy(model, target.device, compiled=True)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.form = f"{self.name}, compiled {ABI}"
        self._compiled = _Decoder(load_library(), target)

    def new_encoder(self, slots: int) -> EncoderState:
        """See `Host.new_encoder`: cross keys and values without a pass of the decoder."""
        return EncoderState(self.target, slots, self._project)

    def _project(self, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        layers: list[Any] = self.target.layers
        made = []
        for attention in (layer.layer[1].EncDecAttention for layer in layers):
            shape = (1, hidden.shape[1], attention.n_heads, attention.key_value_proj_dim)
            keys, values = (linear(hidden).view(shape).transpose(1, 2) for linear in (attention.k, attention.v))
            made.append((keys, values))
        return made

    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """See `Host.run`."""
        if not plan.plain or cache.prefix_length or encoder is None:
            return super().run(plan, cache, first, encoder)
        if self.target.model.training:
            self.target.refuse_training()
        cache.open(first, plan.batch, plan.width)
        logits = self._compiled.run(plan, cache, encoder)
        return PassResult(logits, [Segment(0, None, plan.positions, plan.visible)], {}, self)

    def run_ahead(self, plan: AheadPlan, cache: SlotCache, first: int = 0, encoder: Any = None) -> Course | None:
        """See `Host.run_ahead`."""
        if plan.skip is not None:
            return None
        cache.open(first, plan.batch, plan.steps)
        return self._compiled.run_ahead(plan, cache, encoder)


class _Decoder:
    """The decoder's weights in panels, and the calls."""

    def __init__(self, library: Any, target: Target) -> None:
        self._library, self._scratch = prepared(library), Scratch()
        library.layer_cross.restype = None
        library.layer_cross.argtypes = [POINTER(_Cross), POINTER(_Pass), *[c_void_p] * 3]
        layers: list[Any] = target.layers
        self._kept: list[Any] = []
        self._layers = [self._described(layer) for layer in layers]
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
        packed = [Packed(group) if group else None for group in _linears(layer)]
        self._kept.append(packed)
        matrices = [Matrix() if part is None else part.described for part in packed]
        norms = [part.layer_norm.weight for part in layer.layer]
        return _CrossLayer(*matrices, *(norm.data_ptr() for norm in norms), None, None)

    def run(self, plan: Plan, cache: SlotCache, encoder: EncoderState) -> Tensor:
        """Logits [B, n, V] of the rows that `plan` wants some of; `cache` is open for it."""
        places, visible = plan.positions.contiguous(), plan.visible.contiguous()
        x = nn.functional.embedding(plan.tokens, self._embedding)
        call = _Call(self, cache, encoder, plan.batch, plan.width, plan.width)
        call.cross.places = places.data_ptr()
        call.p.visible, call.p.back = visible.data_ptr(), visible.shape[2] - plan.width
        self._library.layer_cross(call.cross, call.p, x.data_ptr(), call.keys, call.values)
        x = x[:, plan.first_logit_row : plan.last_logit_row].contiguous()
        rows, matrix = x.shape[0] * x.shape[1], self._head.described
        normed, logits = torch.empty_like(x), x.new_empty(*x.shape[:2], matrix.outputs)
        threads = torch.get_num_threads() if rows * matrix.inputs * matrix.outputs > WORTH_THREADS // 4 else 1
        norm = self._norm.data_ptr()
        self._library.layer_norm(x.data_ptr(), norm, self._epsilon, rows, self._hidden, normed.data_ptr())
        self._library.layer_product(matrix, normed.data_ptr(), rows, threads, 0, logits.data_ptr())
        return logits

    def run_ahead(self, plan: AheadPlan, cache: SlotCache, encoder: EncoderState) -> Course:
        """See `Host.run_ahead`; `cache` is open for requests and steps."""
        batch, head = plan.batch, self._head.described
        call = _Call(self, cache, encoder, batch, 1, plan.steps, batch * (2 * self._hidden + head.outputs))
        ahead = _Ahead(
            *(None, ctypes.addressof(call.keys), ctypes.addressof(call.values), len(self._layers)),
            *(self._embedding.data_ptr(), self._norm.data_ptr(), None, None, ctypes.addressof(head)),
            last_position=max(plan.positions) + plan.steps,
            epsilon=self._epsilon,
            cross=ctypes.addressof(call.cross),
        )
        return go(self._library, ahead, call.p, plan, call.work)


class _Call:
    """What C reads in one call, and its memory.

    Args:
        of: the decoder.
        cache, encoder: of the requests; the cache is open.
        batch, rows: of the pass.
        ahead: columns that each request may grow by.
        work: floats that the caller needs besides, at address `work`.
    """

    def __init__(
        self, of: _Decoder, cache: SlotCache, encoder: EncoderState, batch: int, rows: int, ahead: int, work: int = 0
    ) -> None:
        first, starts, count = cache.first, cache.starts, len(of._layers)
        keys, values, seen, lengths = encoder.stores(first, batch)
        self._described = (_CrossLayer * count)(*of._layers)
        for layer, key, value in zip(self._described, keys, values, strict=True):
            layer.keys, layer.values = key.data_ptr(), value.data_ptr()
        stores = [cache.stores(i, of._heads, (of._dim, of._dim), of._embedding) for i in range(count)]
        self.keys = (c_void_p * count)(*(k.data_ptr() for k, _ in stores))
        self.values = (c_void_p * count)(*(v.data_ptr() for _, v in stores))
        total, columns = batch * rows, seen.shape[1]
        longest = max(max(starts) + ahead, columns)
        threads = torch.get_num_threads() if total * of._weights > WORTH_THREADS else 1
        scratch = total * (of._hidden + max(4 * of._heads * of._dim, 2 * of._inner))
        at = of._scratch.floats(scratch + threads * longest + total * longest + work)
        scores, distance = at + 4 * scratch, at + 4 * (scratch + threads * longest)
        self.work = distance + 4 * total * longest
        self._lengths = (c_int64 * batch)(*lengths)
        self._starts = (c_int64 * batch)(*starts)
        self.p = _Pass(
            *(batch, rows, first, cache.capacity, self._starts),
            *(None, None, at, threads, 0, 0, None, None, None),
        )
        self.cross = _Cross(
            *(ctypes.addressof(self._described), of._bias.data_ptr(), seen.data_ptr()),
            *(ctypes.addressof(self._lengths), None, count, of._hidden, of._heads, of._dim, of._inner, columns),
            *(of._bias.shape[1], of._epsilon, longest, scores, distance),
        )


def _linears(layer: Any) -> list[list[Any]]:
    """A decoder layer's linears in the order of `_CrossLayer`, those on the same input together; none for no gate."""
    text, source, dense = layer.layer[0].SelfAttention, layer.layer[1].EncDecAttention, layer.layer[2].DenseReluDense
    mlp = [[dense.wi_1], [dense.wi_0]] if hasattr(dense, "wi_0") else [[dense.wi], []]
    return [[text.q, text.k, text.v], [text.o], [source.q], [source.o], *mlp, [dense.wo]]


def _bias_by_distance(attention: Any) -> Tensor:
    """[heads, distances]: what is added to scores of columns so many tokens back; the last holds for all further."""
    distance = torch.arange(attention.relative_attention_max_distance + 1)
    bucket = attention._relative_position_bucket(
        -distance,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias: Tensor = attention.relative_attention_bias.weight.detach()[bucket].t().contiguous()
    return bias
