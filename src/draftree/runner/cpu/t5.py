"""The eager runner of encoder-decoders: the decoders of T5 and mT5 in float32 on a CPU, compiled.

A stock pass of a small one is mostly overhead of tensor operations; compiled (`_crossed.h`) it takes a fraction of the
time, and several steps ahead go in one call. Passes with anything special in them (rows that join, leave or are tapped)
go through the stock `forward`, over the same caches. The encoder, which runs once a request, is compiled as well
(`draftree.runner.cpu.t5_encoder`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from draftree.native import address
from draftree.runner.cpu.ahead import AheadPlan, Course, Scratch, _Ahead, go, prepared
from draftree.runner.cpu.layers import ABI, WORTH_THREADS, _Pass, load_library
from draftree.runner.cpu.packed import Matrix, Packed
from draftree.runner.cpu.t5_encoder import (
    SourceReader,
    all_plain,
    bias_by_distance,
    dense_linears,
    plain,
    plain_linears,
)
from draftree.runner.cpu.threads import Pace
from draftree.runner.eager.product import may_copy
from draftree.runner.hooked.probe import probe
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.own_type import in_own_type
from draftree.runner.plan import PassResult, Plan, Segment
from draftree.runner.target import Target, plain_weight

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
        *((name, c_void_p) for name in ("embedding", "closing", "head")),
        ("vocabulary", c_int64),
        *((name, c_int64) for name in ("count", "hidden", "heads", "dim", "inner", "columns", "distances")),
        ("epsilon", c_float),
        ("longest", c_int64),
        *((name, c_void_p) for name in ("scores", "distance")),
    )


class T5Runner(HookedRunner):
    """Drives stock T5 and mT5 models; see `Runner`."""

    name = "cpu"

    @staticmethod
    def qualifies(target: Target) -> bool:
        """Whether the model is a T5 or mT5 in its stock state that the compiled functions can drive."""
        if not target.encoder_decoder or target.model_type not in FAMILIES or load_library() is None:
            return False
        if (target.config.dense_act_fn, bool(target.config.is_gated_act)) not in ACTIVATIONS:
            return False
        model = target.model
        for p in model.parameters():
            if not plain_weight(p) or not p.is_cpu or p.dtype != torch.float32:
                return False
        if not (plain(model) and all_plain(target.decoder) and all_plain(model.get_output_embeddings())):
            return False
        layers: list[Any] = target.layers
        if not all(plain_linears(_linears(layer)) for layer in layers):
            return False
        contiguous = target.decoder.get_input_embeddings().weight.is_contiguous()
        return contiguous and may_copy(model, target.device, compiled=True)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.form = f"{self.name} {ABI}"
        self._compiled = _Decoder(load_library(), target)
        self._reader = SourceReader(load_library(), target)

    def new_encoder(self, slots: int) -> EncoderState:
        """See `Runner.new_encoder`: sources are read in one compiled call."""
        return EncoderState(self.target, slots, self._reader)

    @in_own_type
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """See `Runner.run`."""
        if not plan.plain or cache.prefix_length or encoder is None:
            return super().run(plan, cache, first, encoder)
        if self.target.model.training:
            self.target.refuse_training()
        cache.open(first, plan.batch, plan.width)
        logits = self._compiled.run(plan, cache, encoder)
        if logits is None:
            return super().run(plan, cache, first, encoder)  # which says what is wrong
        return PassResult(logits, [Segment(0, None, plan.positions, plan.visible)], {}, self)

    def run_ahead(self, plan: AheadPlan, cache: SlotCache, first: int = 0, encoder: Any = None) -> Course | None:
        """See `Runner.run_ahead`."""
        if plan.skip is not None:
            return None
        cache.open(first, plan.batch, plan.steps)
        return self._compiled.run_ahead(plan, cache, encoder)


class _Decoder:
    """The decoder's weights in panels, and the calls."""

    def __init__(self, library: Any, target: Target) -> None:
        self._library, self._scratch, self._pace = prepared(library), Scratch(), Pace()
        library.layer_crossed.restype = c_int64
        library.layer_crossed.argtypes = [
            *(POINTER(_Cross), POINTER(_Pass), *[c_void_p] * 3),
            *(*[c_int64] * 3, *[c_void_p] * 3),
        ]
        layers: list[Any] = target.layers
        self._kept: list[Any] = []
        self._layers = [self._described(layer) for layer in layers]
        attention = layers[0].layer[0].SelfAttention
        self._heads, self._dim, self._hidden = attention.n_heads, attention.key_value_proj_dim, target.hidden_size
        self._inner = int(self._layers[0].down.inputs)
        self._bias = bias_by_distance(attention)
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
        return _CrossLayer(*matrices, *(address(norm, torch.float32) for norm in norms), None, None)

    def run(self, plan: Plan, cache: SlotCache, encoder: EncoderState) -> Tensor | None:
        """Logits [B, n, V] of the rows that `plan` wants some of; `cache` is open for it. None for unknown tokens."""
        tokens, places, visible = plan.tokens.contiguous(), plan.positions.contiguous(), plan.visible.contiguous()
        batch, width, head = plan.batch, plan.width, self._head.described
        begin, end, _ = slice(plan.first_logit_row, plan.last_logit_row).indices(width)
        floats = batch * width * self._hidden
        call = self.call(cache, encoder, batch, width, width, 2 * floats)
        call.cross.places = address(places, torch.long)
        call.p.visible, call.p.back = address(visible, torch.bool), visible.shape[2] - width
        logits = torch.empty(batch, end - begin, head.outputs, dtype=torch.float32, device="cpu")
        wanted = batch * (end - begin)
        at_head = wanted * head.inputs * head.outputs
        threads = self._pace.threads(at_head, WORTH_THREADS // 4)
        began = self._pace.clock()
        done = self._library.layer_crossed(
            *(call.cross, call.p, address(tokens, torch.long), call.keys, call.values, begin, end, threads),
            *(call.work, call.work + 4 * floats, address(logits, torch.float32)),
        )
        if not done:
            return None
        self._pace.took(batch * width * self._weights + at_head, max(call.p.threads, threads), began)
        return logits

    def run_ahead(self, plan: AheadPlan, cache: SlotCache, encoder: EncoderState) -> Course:
        """See `Runner.run_ahead`; `cache` is open for requests and steps."""
        batch, head = plan.batch, self._head.described
        call = self.call(cache, encoder, batch, 1, plan.steps, batch * (2 * self._hidden + head.outputs))
        ahead = _Ahead(
            *(None, ctypes.addressof(call.keys), ctypes.addressof(call.values), len(self._layers)),
            *(address(self._embedding, torch.float32), address(self._norm, torch.float32)),
            *(None, None, ctypes.addressof(head)),
            last_position=max(plan.positions) + plan.steps,
            epsilon=self._epsilon,
            cross=ctypes.addressof(call.cross),
        )
        began = self._pace.clock()
        course = go(self._library, ahead, call.p, plan, call.work)
        work = batch * (self._weights + head.inputs * head.outputs)
        self._pace.took(len(course.tokens[0]) * work, call.p.threads, began)
        return course

    def call(self, cache: SlotCache, encoder: EncoderState, batch: int, rows: int, ahead: int, work: int) -> _Call:
        """What C reads in a call, good until the next one over the same cache, which is open.

        Args:
            cache, encoder: of the requests.
            batch, rows: of the pass.
            ahead: columns that each request may grow by.
            work: floats that the caller needs besides, at the address `work` of what is returned.
        """
        lengths = encoder.sources(cache.first, batch)
        call: _Call | None = cache.notes.get(self)
        if call is None or call.of is not encoder or call.laid != encoder.laid:
            call = _Call(self, cache, encoder)  # may lay the cache's stores, so it is noted behind that
            cache.notes[self] = call
        call.open(self, cache, lengths, rows, ahead, work)
        return call


class _Call:
    """What C reads in calls over one cache: where everything lies is the same from call to call."""

    def __init__(self, decoder: _Decoder, cache: SlotCache, encoder: EncoderState) -> None:
        self.of, self.laid, count = encoder, encoder.laid, len(decoder._layers)
        keys, values, seen = encoder.stores()
        self._layers = (_CrossLayer * count)(*decoder._layers)
        for layer, key, value in zip(self._layers, keys, values, strict=True):
            layer.keys, layer.values = address(key, torch.float32), address(value, torch.float32)
        widths = decoder._dim, decoder._dim
        stores = [cache.stores(i, decoder._heads, widths, decoder._embedding) for i in range(count)]
        self.keys = (c_void_p * count)(*(address(k, torch.float32) for k, _ in stores))
        self.values = (c_void_p * count)(*(address(v, torch.float32) for _, v in stores))
        like, head = decoder._embedding, decoder._head.described
        self.cross = _Cross(
            *(ctypes.addressof(self._layers), address(decoder._bias, torch.float32), address(seen, torch.bool)),
            *(None, None),
            *(address(like, torch.float32), address(decoder._norm, torch.float32), ctypes.addressof(head), len(like)),
            *(count, decoder._hidden, decoder._heads, decoder._dim, decoder._inner, seen.shape[1]),
            *(decoder._bias.shape[1], decoder._epsilon),
        )
        self._columns = seen.shape[1]

    def open(
        self, decoder: _Decoder, cache: SlotCache, lengths: Sequence[int], rows: int, ahead: int, work: int
    ) -> None:
        """Get ready for a call; `lengths` are those of the requests' sources, the others as of `_Decoder.call`."""
        batch = len(lengths)
        starts, total = cache.starts, batch * rows
        longest = max(max(starts) + ahead, self._columns)
        threads = decoder._pace.threads(total * decoder._weights, WORTH_THREADS)
        scratch = total * (decoder._hidden + max(4 * decoder._heads * decoder._dim, 2 * decoder._inner))
        at = decoder._scratch.floats(scratch + threads * longest + total * longest + work)
        cross = self.cross
        cross.longest, cross.places = longest, None
        cross.scores, cross.distance = at + 4 * scratch, at + 4 * (scratch + threads * longest)
        self.work = cross.distance + 4 * total * longest
        self._lengths = (c_int64 * batch)(*lengths)
        cross.lengths = ctypes.addressof(self._lengths)
        self.p = _Pass(batch, rows, cache.first, cache.capacity, (c_int64 * batch)(*starts))
        self.p.scratch, self.p.threads = at, threads


def _linears(layer: Any) -> list[list[Any]]:
    """A decoder layer's linears in the order of `_CrossLayer`, those on the same input together; none for no gate."""
    text, source = layer.layer[0].SelfAttention, layer.layer[1].EncDecAttention
    return [[text.q, text.k, text.v], [text.o], [source.q], [source.o], *dense_linears(layer.layer[2].DenseReluDense)]
