"""What Hugging Face's `generate` hands to a decoding loop for the model: what we have no use for, and what we refuse.

draftree's passes give a model token ids, positions and a mask, all made from the ids. An input of another kind would
change the text in Hugging Face's own loop, so it is never dropped in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftree.engine.limits import check_mask
from draftree.runner.target import CACHES

# Made by `generate` itself, or about its own loop and cache.
WITHOUT_EFFECT = ("cache_position", "encoder_outputs", "logits_to_keep", "use_cache")


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any], *, encoder_decoder: bool) -> None:
    """Refuse inputs of the model that our passes would not show it.

    Args:
        input_ids: [batch, length], the decoder's.
        model_kwargs: by name, as a custom loop gets them.
        encoder_decoder: whether the model is one; its encoder has run already.

    Raises:
        ValueError: one of them; what to do.
    """
    for name, value in model_kwargs.items():
        if value is None or value is False or name in WITHOUT_EFFECT:
            continue
        if name == "mm_encoder_outputs" and not value:  # `generate` itself puts it there, also for text alone
            continue
        if name == "attention_mask":
            if not isinstance(value, Tensor) or value.dim() != 2:
                raise ValueError("attention_mask must be [batch, length]: draftree makes the mask of its trees itself.")
        elif name in CACHES:
            if value.get_seq_length():
                raise ValueError(
                    f"{name} holds tokens already, and draftree decodes on a cache of its own: leave it out "
                    "and give the whole text."
                )
        elif name == "inputs_embeds":
            if not encoder_decoder:  # or they were the encoder's, which has run
                raise ValueError("inputs_embeds cannot be drafted for: give input_ids instead.")
        elif name == "position_ids":
            _check_positions(input_ids, value, model_kwargs.get("attention_mask"))
        elif name == "decoder_attention_mask":
            if not value.bool().all():
                raise ValueError(
                    "decoder_attention_mask hides tokens of decoder_input_ids, which draftree does not do: leave both "
                    "out, or start all rows with equally many tokens."
                )
        else:
            raise ValueError(f"{name} is an input that draftree's passes do not give the model: leave {name} out.")


def _check_positions(input_ids: Tensor, positions: Tensor, mask: Tensor | None) -> None:
    check_mask(input_ids, mask)
    rows, length = input_ids.shape
    # `generate` makes them of a mask, and drops a mask that hides nothing.
    if positions.shape[-1] != length or (positions.dim() == 2 and len(positions) not in (1, rows)):
        raise ValueError(
            f"attention_mask or position_ids have shape {tuple(positions.shape)} and input_ids "
            f"{tuple(input_ids.shape)}: give one value per token."
        )
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    usual = real.long().cumsum(-1) - 1
    if not bool(((positions == usual) | ~real).all()):
        raise ValueError("position_ids differ from the tokens' places in the text: leave position_ids out.")
