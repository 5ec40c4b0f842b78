"""How far logits move with the number of rows: the tolerance of strict mode, measured on the model itself."""

from __future__ import annotations

import torch

from draftree.host import Host
from draftree.host.plan import Plan

LENGTH = 32  # random tokens compared
SAFETY = 4.0  # times the largest difference seen: a near-tie needs two logits to move


def measure_tolerance(host: Host) -> float:
    """Largest difference of logits between one-row passes and one pass over the same rows, times a margin.

    Two logits closer than this could change places with the row count (16-bit types; in fp32 it is about 1e-4).
    """
    with host.guard():
        return SAFETY * _worst_difference(host)


def _worst_difference(host: Host) -> float:
    target = host.target
    if target.encoder_decoder:
        raise ValueError("strict=True is for decoder-only models: use fp32 weights with this encoder-decoder.")
    device = target.device
    length = min(LENGTH, (target.max_positions or LENGTH))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.vocab_size, (1, length), generator=generator).to(device)
    together = host.run(
        Plan(
            tokens,
            torch.arange(length, device=device)[None],
            torch.ones(1, length, length, dtype=torch.bool, device=device).tril(),
        ),
        host.new_cache(1, length),
    ).logits.float()
    cache = host.new_cache(1, length)
    worst = 0.0
    for i in range(length):
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        result = host.run(Plan(tokens[:, i : i + 1], torch.tensor([[i]], device=device), one), cache)
        worst = max(worst, float((result.logits[0, 0].float() - together[0, i]).abs().max()))
        cache.commit([[0]], result.segments)
    return worst
