"""Encoders of T5 and mT5 compiled, with the keys and values that the decoder's layers make of what they say.

A source is read once a request. Stock, that takes as long as a dozen compiled steps of the decoder that follow it; here
it is one call (`_source.h`), which writes the keys and values where passes read them.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from draftree.native import address, optional_address
from draftree.runner.cpu.ahead import Scratch
from draftree.runner.cpu.layers import WORTH_THREADS
from draftree.runner.cpu.packed import Matrix, Packed, PackedLinear
from draftree.runner.cpu.threads import Pace
from draftree.runner.own_type import in_own_type
from draftree.runner.target import Target

PLAIN = ("torch.nn.", "transformers.", "draftree.runner.cpu.packed")  # modules whose classes nobody has changed


class _SourceLayer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "up", "gate", "down")),
        *((name, c_void_p) for name in ("norm", "mlp_norm")),
    )


class _Source(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "bias", "embedding", "norm", "crossed")),
        *((name, c_int64) for name in ("count", "hidden", "heads", "dim", "inner", "reach", "vocabulary")),
        *((name, c_int64) for name in ("crossings", "cross_heads", "cross_dim")),
        ("epsilon", c_float),
    )


class SourceReader:
    """Reads sources for an `EncoderState`.

    Args:
        library: the compiled functions.
        target: a T5 or mT5 whose decoder is compiled; an encoder that is not as plain runs by its own `forward`.
    """

    def __init__(self, library: Any, target: Target) -> None:
        self._call, self._scratch, self._pace = library.layer_source, Scratch(), Pace()
        self._call.restype = c_int64
        self._call.argtypes = [POINTER(_Source), c_void_p, c_void_p, *[c_int64] * 4, *[c_void_p] * 6]
        self._encoder: Any = target.model.get_encoder()
        blocks = list(self._encoder.block) if _fits(self._encoder) else []
        self.compiled = bool(blocks)  # whether the encoder runs here too
        described = [_described(block) for block in blocks]
        self._packed = [packed for packed, _ in described]
        self._layers = (_SourceLayer * len(blocks))(*(layer for _, layer in described))
        layers: list[Any] = target.layers
        crossing = [layer.layer[1].EncDecAttention for layer in layers]
        self._crossed = [Packed([attention.k, attention.v]) for attention in crossing]
        matrices = (Matrix * len(crossing))(*(packed.described for packed in self._crossed))
        hidden, inner = target.hidden_size, int(target.config.d_ff)
        heads, dim = crossing[0].n_heads, crossing[0].key_value_proj_dim
        self.heads, self.dim, self.layers = heads, dim, len(crossing)
        self._embedding = self._encoder.get_input_embeddings().weight.detach()
        norm = self._encoder.final_layer_norm if blocks else layers[0].layer[1].layer_norm
        self._bias = bias_by_distance((blocks or layers)[0].layer[0].SelfAttention, both_ways=True)
        self._weights = sum(p.numel() for p in self._encoder.parameters()) - self._embedding.numel()
        self._weights += sum(packed.described.inputs * packed.described.outputs for packed in self._crossed)
        self._described = _Source(
            *(ctypes.addressof(self._layers), *(address(t, torch.float32) for t in (self._bias, self._embedding))),
            *(address(norm.weight, torch.float32), ctypes.addressof(matrices), len(blocks), hidden, heads, dim, inner),
            *(self._bias.shape[1] // 2, len(self._embedding), len(crossing), heads, dim, norm.variance_epsilon),
        )
        self._kept = matrices, norm.weight
        self._wide = hidden + max(4 * heads * dim, 2 * inner)  # floats a token

    @in_own_type
    def read(
        self,
        slot: int,
        source: Tensor | None,
        seen: Tensor,
        states: Tensor | None,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> None:
        """Put cross keys and values of a source into `slot`.

        Args:
            slot: of the request.
            source: LongTensor [L]; not looked at where `states` are given.
            seen: BoolTensor [L], where the source is real.
            states: float32 [L, d], the encoder's output where it is known.
            keys, values: of every decoder layer, each [slots, heads, columns, dim].

        Raises:
            IndexError: a token id that the encoder has no embedding for.
        """
        length, width = len(seen), self._described.hidden
        if states is None and not self.compiled:
            assert source is not None
            states = self._encoder(input_ids=source[None], attention_mask=seen[None].long())[0][0]
        work = length * self._weights
        threads = self._pace.threads(work, WORTH_THREADS)
        states = None if states is None else states.contiguous()
        tokens = source.contiguous() if states is None and source is not None else None
        seen = seen.contiguous()
        at = self._scratch.floats(length * (width + self._wide + threads + length))
        x = at if states is None else address(states, torch.float32)
        scratch = at + 4 * length * width
        scores = scratch + 4 * length * self._wide
        count = c_void_p * len(keys)
        began = self._pace.clock()
        done = self._call(
            *(self._described, optional_address(tokens, torch.long), address(seen, torch.bool), length, threads),
            *(slot, keys[0].shape[2], x, scratch, scores, scores + 4 * length * threads),
            *(count(*(address(store, torch.float32) for store in stores)) for stores in (keys, values)),
        )
        if not done:
            raise IndexError(
                f"The source holds a token id outside the encoder's {self._described.vocabulary} embeddings."
            )
        self._pace.took(work, threads, began)


def plain(module: torch.nn.Module) -> bool:
    """Whether a module computes what its class says: no hooks, no class of others; its parts may be anything."""
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
        return False
    return type(module).__module__.startswith(PLAIN)


def all_plain(part: torch.nn.Module) -> bool:
    """Whether that holds for a part of a model and all of its own."""
    return all(plain(module) for module in part.modules())


def _fits(encoder: Any) -> bool:
    if not all_plain(encoder) or not encoder.get_input_embeddings().weight.is_contiguous():
        return False
    return all(plain_linears(_linears(block)) for block in encoder.block)


def dense_linears(dense: Any) -> list[list[Any]]:
    """Of an MLP of T5's: what goes up, the gate where there is one, what goes down."""
    up = [[dense.wi_1], [dense.wi_0]] if hasattr(dense, "wi_0") else [[dense.wi], []]
    return [*up, [dense.wo]]


def bias_by_distance(attention: Any, both_ways: bool = False) -> Tensor:
    """What is added to scores of columns by their distance; the last holds for all further.

    Returns:
        [heads, distances] of columns so many tokens back; with `both_ways` [heads, 2 R + 1], from R tokens back on.
    """
    most = attention.relative_attention_max_distance
    bucket = attention._relative_position_bucket(
        torch.arange(-most, most + 1, device="cpu") if both_ways else -torch.arange(most + 1, device="cpu"),
        bidirectional=both_ways,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=most,
    )
    bias: Tensor = attention.relative_attention_bias.weight.detach()[bucket].t().contiguous()
    return bias


def plain_linears(groups: list[list[Any]]) -> bool:
    """Whether all are linears that can be had in panels."""
    return all(type(m) in (torch.nn.Linear, PackedLinear) for group in groups for m in group)


def _linears(block: Any) -> list[list[Any]]:
    attention = block.layer[0].SelfAttention
    return [[attention.q, attention.k, attention.v], [attention.o], *dense_linears(block.layer[1].DenseReluDense)]


def _described(block: Any) -> tuple[Any, _SourceLayer]:
    packed = [Packed(group) if group else None for group in _linears(block)]
    matrices = [Matrix() if part is None else part.described for part in packed]
    norms = [part.layer_norm.weight for part in block.layer]
    return (packed, norms), _SourceLayer(*matrices, *(address(norm, torch.float32) for norm in norms))
