"""The cross attention of encoder-decoders: the encoder runs once a request, its keys and values stay in a slot.

A request is admitted by one run of the encoder and one run of the decoder on a single row, in which the stock model of
any family computes its cross keys and values. Later passes read them; the encoder's hidden states are dropped. Sources
of different lengths share a pass behind a padding mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from draftree.runner.kv.cache import SlotCache
from draftree.runner.target import Target


class EncoderState(SlotCache):
    """Cross attention of the requests in a slot cache, whose `lengths` are those of the sources, 0 for none."""

    def __init__(self, target: Target, slots: int) -> None:
        super().__init__(len(target.layers), slots)
        self.target = target

    @torch.no_grad()
    def admit(self, slot: int, input_ids: Tensor | None, states: Tensor | None = None) -> None:
        """Encode one request's source and store its cross keys and values in `slot`.

        Args:
            input_ids: LongTensor [L], the source; ignored where `states` are given.
            states: floating [L, d], the encoder's output where it is known.
        """
        source = input_ids if states is None else states[:, 0]
        assert source is not None
        layers = self._stock(source, states)
        self.clear(slot)
        self.open(slot, 1, len(source))
        for number, layer in enumerate(layers):
            # Trainers run this under autocast, where the type may differ from the model's.
            self.update(layer.keys.to(self.target.dtype), layer.values.to(self.target.dtype), number)
        self.lengths[slot] = len(source)

    def _stock(self, source: Tensor, states: Tensor | None) -> list[Any]:
        """Return the stock model's cross keys and values, of its encoder unless states are known and a decoder row."""
        model, device = self.target.model, self.target.device
        mask = torch.ones(1, len(source), dtype=torch.long, device=device)
        if states is None:
            hidden = model.get_encoder()(input_ids=source.to(device)[None], attention_mask=mask)[0]
        else:
            hidden = states[None].to(device=device, dtype=self.target.dtype)
        cross = DynamicCache()
        model(
            decoder_input_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=mask,
            use_cache=True,
            **{self.target.cache_argument: EncoderDecoderCache(DynamicCache(), cross)},
        )
        return cross.layers

    def arguments(self, cache: SlotCache, first: int, batch: int) -> dict[str, Any]:
        """Return keyword arguments of the model's `forward` for the requests in slots [first, first + batch)."""
        lengths, device = self.lengths[first : first + batch], self.target.device
        longest, stop = max(lengths), first + batch
        cross = DynamicCache()
        for number in range(len(self.keys)):
            (keys, values), layer = self._layer(number), DynamicLayer()
            layer.keys, layer.values = keys[first:stop, :, :longest], values[first:stop, :, :longest]
            layer.is_initialized = True
            cross.layers.append(layer)
        # Once there are cross keys and values, models read only the shape of the encoder's output.
        shape = (batch, longest, self.target.hidden_size)
        hidden = torch.zeros((), dtype=self.target.dtype, device=device).expand(shape)
        ends = torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=hidden),
            "attention_mask": (torch.arange(longest, device=device) < ends).long(),
            self.target.cache_argument: EncoderDecoderCache(cache, cross),
        }
