"""Strict mode: drafting that decides near-ties as plain decoding does, for 16-bit types.

In 16 bits a row's logits change in their last bits with the other rows of the pass, and where the two best are that
close another token wins. How far they change is measured on the model itself, once per engine. Then:

- A choice whose two best scores are further apart than the measured tolerance is the plain engine's choice.
- A closer one is put off and decided by a pass without draft tokens, and counted (`re_decided`).
- The prompt passes without draft tokens, so its keys and values are the plain engine's.
- On the eager runner each row attends alone, over exactly the columns it sees. Where matrix products do not depend on
  the number of rows either (bfloat16 on CPUs), the tolerance is 0: ids and bits are the plain engine's at batch 1.

What is not promised: where the tolerance is over 0, keys and values that were computed together with draft tokens may
differ in their last bit from the plain engine's, so a near-tie can still fall the other way, only less often. The same
goes for batches, whose passes hold other requests at other times with drafts than without, and for a token at the very
edge of top_k, top_p and their like. Whoever needs certainty there uses float32.
"""

from __future__ import annotations

import torch

from draftree.runner import Runner
from draftree.runner.plan import Plan

LENGTH = 48  # random tokens compared
SAFETY = 4.0  # times the largest difference seen: a near-tie needs two logits to move


def measure_tolerance(runner: Runner) -> float:
    """Largest difference of logits between one-row passes and one pass over the same rows, times a margin.

    In fp32 it is about 1e-4, in 16 bits some units in the last place, or 0 (see above).

    Raises:
        ValueError: an encoder-decoder.
    """
    with runner.lock, runner.guard():
        return SAFETY * _worst_difference(runner)


def _worst_difference(runner: Runner) -> float:
    target = runner.target
    if target.encoder_decoder:
        raise ValueError("strict=True is for decoder-only models: use fp32 weights with this encoder-decoder.")
    device = target.device
    length = min(LENGTH, (target.max_positions or LENGTH))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.vocab_size, (1, length), generator=generator, device="cpu").to(device)
    together = runner.run(
        Plan(
            tokens,
            torch.arange(length, device=device)[None],
            torch.ones(1, length, length, dtype=torch.bool, device=device).tril(),
            row_by_row=True,
        ),
        runner.new_cache(1, length),
    ).logits.float()
    cache = runner.new_cache(1, length)
    worst = 0.0
    for i in range(length):
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        result = runner.run(
            Plan(tokens[:, i : i + 1], torch.tensor([[i]], device=device, dtype=torch.long), one), cache
        )
        worst = max(worst, float((result.logits[0, 0].float() - together[0, i]).abs().max()))
        cache.commit([[0]], result.segments)
    return worst
