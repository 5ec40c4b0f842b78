"""The encoder's side of encoder-decoders: run once a request, its cross keys and values kept by slot.

A request is admitted by one run of the encoder and one single-row run of the decoder, whose only purpose is that the
stock model computes its own cross keys and values, whatever its family. Every later pass finds them ready; the
encoder's hidden states themselves are not kept. Sources of different lengths share a pass behind a padding mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from draftree.runner.kv.cache import SlotCache, finite
from draftree.runner.target import Target

BLOCK = 64  # columns by which the store grows


class EncoderState:
    """Cross attention of the requests in a slot cache; it is changed in step with the cache.

    Args:
        target: an encoder-decoder.
        slots: number of requests held at once.

    Attributes:
        lengths: tokens of each slot's source, 0 where there is none.

    Raises:
        ValueError: the target is decoder-only.
    """

    # Tensors born in inference mode could not be written outside it, and requests may be admitted either way.
    @torch.inference_mode(False)
    def __init__(self, target: Target, slots: int) -> None:
        if not target.encoder_decoder:
            raise ValueError(f"'{target.model_type}' is decoder-only: it needs no EncoderState.")
        self.target = target
        self.lengths = [0] * slots
        self._keys: list[Tensor] = []  # a layer: [slots, heads, columns, head dim]
        self._values: list[Tensor] = []
        self._mask = torch.zeros(slots, 0, dtype=torch.bool, device=target.device)  # [slots, columns]

    @torch.no_grad()
    def admit(self, slot: int, input_ids: Tensor | None, states: Tensor | None = None) -> None:
        """Encode one request's source and keep its cross keys and values in `slot`.

        Args:
            slot: slot of the request.
            input_ids: LongTensor [L], the source; not looked at where `states` are given.
            states: floating [L, d], the encoder's output where it is known already.

        Raises:
            ValueError: no source, or an empty one.
        """
        source = input_ids if states is None else states[:, 0]
        if source is None or source.dim() != 1 or source.numel() == 0:
            raise ValueError("The encoder needs a source: one sequence of at least one token, or its states [L, d].")
        length = source.shape[0]
        layers = self._stock(source, states)
        self._reserve(layers, length)
        for layer, keys, values in zip(layers, self._keys, self._values, strict=True):
            keys[slot, :, :length] = finite(layer.keys[0])
            values[slot, :, :length] = finite(layer.values[0])
        self._mask[slot] = torch.arange(self._mask.shape[1], device=self._mask.device) < length
        self.lengths[slot] = length

    def _stock(self, source: Tensor, states: Tensor | None) -> list[_CrossLayer]:
        """Cross keys and values by the stock model: its encoder, unless states are known, and a row of its decoder."""
        model, device = self.target.model, self.target.device
        mask = torch.ones(1, len(source), dtype=torch.long, device=device)
        if states is None:
            hidden = model.get_encoder()(input_ids=source.to(device)[None], attention_mask=mask)[0]
        else:
            hidden = states[None].to(device=device, dtype=self.target.dtype)
        cross = _CrossLayers()
        model(
            decoder_input_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=mask,
            use_cache=True,
            **{self.target.cache_argument: EncoderDecoderCache(DynamicCache(), cross)},
        )
        return cross.layers

    @torch.inference_mode(False)
    def _reserve(self, like: list[_CrossLayer], length: int) -> None:
        """Have room for a source; `like` has each layer's keys and values [1, heads, any number, dim]."""
        slots, columns = len(self.lengths), -(-length // BLOCK) * BLOCK
        more = columns - self._mask.shape[1]
        if more <= 0:
            return
        if not self._keys:
            empty = [(layer.keys[:, :, :0], layer.values[:, :, :0]) for layer in like]
            if torch.is_autocast_enabled(self._mask.device.type):  # other passes may come without it
                empty = [(keys.to(self.target.dtype), values.to(self.target.dtype)) for keys, values in empty]
            self._keys = [keys.expand(slots, -1, -1, -1) for keys, _ in empty]
            self._values = [values.expand(slots, -1, -1, -1) for _, values in empty]
        # Made before any is put in its place: where there is no memory for one, requests at work go on with the old.
        keys, values = (
            [functional.pad(held, (0, 0, 0, more)) for held in store] for store in (self._keys, self._values)
        )
        mask = functional.pad(self._mask, (0, more))
        self._keys, self._values, self._mask = keys, values, mask

    def arguments(self, cache: SlotCache, first: int, batch: int) -> dict[str, Any]:
        """Keyword arguments of the model's `forward` for the requests in slots [first, first + batch).

        Raises:
            ValueError: a slot that holds no admitted request.
        """
        lengths = self.sources(first, batch)
        longest, stop = max(lengths), first + batch
        cross = _CrossLayers(
            [
                _CrossLayer(keys[first:stop, :, :longest], values[first:stop, :, :longest])
                for keys, values in zip(self._keys, self._values, strict=True)
            ]
        )
        # Models ask the encoder's output for its shape only, once cross keys and values are there.
        shape = (batch, longest, self.target.hidden_size)
        hidden = torch.zeros((), dtype=self.target.dtype, device=self._mask.device).expand(shape)
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=hidden),
            "attention_mask": self._mask[first:stop, :longest].long(),
            self.target.cache_argument: EncoderDecoderCache(cache, cross),
        }

    def stores(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """For passes that read them in place.

        Returns:
            keys and values of all slots by layer, each [slots, heads, columns, dim]; which columns are real, BoolTensor
            [slots, columns].
        """
        return self._keys, self._values, self._mask

    def sources(self, first: int, batch: int) -> list[int]:
        """Lengths of the sources in slots [first, first + batch).

        Raises:
            ValueError: a slot that holds no admitted request.
        """
        lengths = self.lengths[first : first + batch]
        if min(lengths) == 0:
            raise ValueError(f"Slot {first + lengths.index(0)} has no source: call `admit` before its first pass.")
        return lengths

    def move(self, source: int, target: int) -> None:
        """Copy slot `source` over slot `target`."""
        for held in (*self._keys, *self._values, self._mask):
            held[target] = held[source]
        self.lengths[target] = self.lengths[source]

    def exchange(self, one: int, other: int) -> None:
        """Let two slots change their contents."""
        for held in (*self._keys, *self._values, self._mask):
            held[[one, other]] = held[[other, one]]
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    @torch.inference_mode(False)
    def arrange(self, order: Sequence[int], slots: int) -> None:
        """Have `slots` slots: the first take over from the present ones of `order`, further ones are empty."""
        index = list(order)

        def arranged(old: Tensor) -> Tensor:
            new = old.new_zeros(slots, *old.shape[1:])
            new[: len(index)] = old[index]
            return new

        keys, values = ([arranged(held) for held in store] for store in (self._keys, self._values))
        mask = arranged(self._mask)
        self._keys, self._values, self._mask = keys, values, mask
        self.lengths = [self.lengths[slot] for slot in index] + [0] * (slots - len(index))

    def clear(self, slot: int) -> None:
        """Forget a slot's source."""
        self.lengths[slot] = 0


class _CrossLayer:
    """Keys and values [B, heads, L, head dim] of one layer, where stock models look for them."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class _CrossLayers(Cache):
    """A cross-attention cache over given layers, or an empty one that the model fills."""

    def __init__(self, layers: list[_CrossLayer] | None = None) -> None:
        # Hugging Face's Cache.__init__ wants layer objects; models only call what is overridden below.
        self.layers: list[Any] = layers or []
        self.layer_class_to_replicate = None
        self.offloading = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.layers), "layers fill the cross cache in order"
        self.layers.append(_CrossLayer(key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].keys.shape[2] if layer_idx < len(self.layers) else 0

    def __len__(self) -> int:
        return len(self.layers)
