"""Rotary angles of rows whose positions are no simple range.

Most rotary modules are pure functions of the positions given. Two kinds ('dynamic' NTK and 'longrope') pick
their frequencies from the largest position of the *call*, so a tree row's angles would depend on its
neighbours. Here they are computed per row, from the row's own position (never below the prompt's length,
which is what Hugging Face's prefill uses), so that every row gets what token-by-token decoding would have
given it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LENGTH_DEPENDENT = ("dynamic", "longrope")


def is_length_dependent(module: nn.Module) -> bool:
    """Whether a rotary module chooses its frequencies from the length of the call."""
    return getattr(module, "rope_type", None) in LENGTH_DEPENDENT


def per_row_angles(module: Any, positions: Tensor, floor: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, N, rotary dim] of a length-dependent rotary `module`, row by row.

    Args:
        module: the model's rotary module.
        positions: LongTensor [B, N].
        floor: per request, the length below which the length does not choose (the prompt's).
        dtype: dtype of the result.
    """
    lengths = positions + 1
    if floor:
        lengths = torch.maximum(lengths, torch.tensor(floor, device=positions.device, dtype=torch.long)[:, None])
    distinct, which = lengths.unique(return_inverse=True)
    table = torch.stack([_frequencies(module, int(n), positions.device) for n in distinct.tolist()])
    angles = positions[..., None].float() * table[which]
    angles = torch.cat([angles, angles], -1)
    scale = module.attention_scaling
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _frequencies(module: Any, length: int, device: torch.device) -> Tensor:
    config = module.config
    if module.rope_type == "longrope":
        original = config.rope_parameters["original_max_position_embeddings"]
        chosen = original + 1 if length > original else original
        return ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=chosen)[0].float()
    if length <= module.original_max_seq_len:
        return module.original_inv_freq.to(device).float()
    return ROPE_INIT_FUNCTIONS["dynamic"](config, device, seq_len=length)[0].float()
