"""The encoder's side of encoder-decoders: run once a request, its cross keys and values kept by slot.

A request is admitted by one run of the encoder and one single-row run of the decoder, whose only purpose is that the
stock model computes its own cross keys and values, whatever its family. Every later pass finds them ready; the
encoder's hidden states themselves are not kept. Sources of different lengths share a pass behind a padding mask.
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
    """Cross attention of the requests in a slot cache, whose `lengths` are those of the sources, 0 for none.

    Args:
        target: an encoder-decoder.
        slots: number of requests held at once.

    Raises:
        ValueError: the target is decoder-only.
    """

    def __init__(self, target: Target, slots: int) -> None:
        if not target.encoder_decoder:
            raise ValueError(f"'{target.model_type}' is decoder-only: it needs no EncoderState.")
        super().__init__(len(target.layers), slots)
        self.target = target

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
        layers = self._stock(source, states)
        self.clear(slot)
        self.open(slot, 1, len(source))
        for number, layer in enumerate(layers):
            # Under autocast they may come in another type than that in which other passes compute.
            self.update(layer.keys.to(self.target.dtype), layer.values.to(self.target.dtype), number)
        self.lengths[slot] = len(source)

    def _stock(self, source: Tensor, states: Tensor | None) -> list[Any]:
        """Cross keys and values by the stock model: its encoder, unless states are known, and a row of its decoder."""
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
        """Keyword arguments of the model's `forward` for the requests in slots [first, first + batch).

        Raises:
            ValueError: a slot that holds no admitted request.
        """
        lengths, device = self.sources(first, batch), self.target.device
        longest, stop = max(lengths), first + batch
        cross = DynamicCache()
        for keys, values in zip(self.keys, self.values, strict=True):
            assert keys is not None
            assert values is not None
            layer = DynamicLayer()
            layer.keys, layer.values = keys[first:stop, :, :longest], values[first:stop, :, :longest]
            layer.is_initialized = True
            cross.layers.append(layer)
        # Models ask the encoder's output for its shape only, once cross keys and values are there.
        shape = (batch, longest, self.target.hidden_size)
        hidden = torch.zeros((), dtype=self.target.dtype, device=device).expand(shape)
        ends = torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=hidden),
            "attention_mask": (torch.arange(longest, device=device) < ends).long(),
            self.target.cache_argument: EncoderDecoderCache(cache, cross),
        }

    def sources(self, first: int, batch: int) -> list[int]:
        """Lengths of the sources in slots [first, first + batch).

        Raises:
            ValueError: a slot that holds no admitted request.
        """
        lengths = self.lengths[first : first + batch]
        if min(lengths) == 0:
            raise ValueError(f"Slot {first + lengths.index(0)} has no source: call `admit` before its first pass.")
        return lengths
