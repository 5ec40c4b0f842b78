"""The likeliest tokens of logits, brought to the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def top_tokens(logits: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The best `count` tokens of logits [B, D, V] and their log-probabilities, each [B, D, count], on the CPU.

    One copy brings both. Tokens are 0 and their log-probabilities -inf where all logits of a depth are -inf.
    """
    top = logits.float().log_softmax(-1).topk(count, -1)
    if logits.is_cpu:
        tokens, logp = top.indices.numpy(), top.values.numpy()
    else:
        packed = torch.stack([top.indices.int(), top.values.contiguous().view(torch.int32)]).numpy(force=True)
        tokens, logp = packed[0].astype(np.int64), packed[1].view(np.float32)
    impossible = np.isnan(logp)  # of logits that are all -inf
    return np.where(impossible, 0, tokens), np.where(impossible, np.float32(-np.inf), logp)
