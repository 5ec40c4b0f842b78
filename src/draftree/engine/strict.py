"""Strict mode: in 16 bits an answer has, bit for bit, the scores of plain decoding alone.

In 16 bits a row's logits change in their last bits with the other rows of a pass, and two tokens that are nearly tied
may change places. With `strict` nothing of a pass depends on what else is in it:

- Each row attends alone, over its context and its branch, as it would in a pass of one row (`Plan.row_by_row`).
- A prompt passes without draft tokens and without other requests, in chunks of one size.
- Matrix products must not depend on the number of rows. Those of CPUs do not, those of GPUs mostly do. So the model is
  tried once: the same tokens row by row, and several rows at a time. Where the scores differ, `strict` is refused.

An answer is then the one that the engine gives to that prompt alone without a drafter, in any batch.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from draftree.runner import Runner
from draftree.runner.plan import Plan

WIDTHS = (2, 3, 5, 7, 16)  # rows of the passes that are compared with passes of one row
FLOAT32 = 1e-4  # of the largest score: in float32 sums move by so much less than any two tokens lie apart

_found: weakref.WeakKeyDictionary[Runner, dict[tuple[int, bool], float]] = weakref.WeakKeyDictionary()


def check_strict(runner: Runner) -> None:
    """Try whether rows of a pass leave each other's scores alone; once for each runner and number of threads.

    Raises:
        ValueError: they do not, or an encoder-decoder.
    """
    target = runner.target
    if target.encoder_decoder:
        raise ValueError("strict=True is for decoder-only models: use fp32 weights with this encoder-decoder.")
    state = torch.get_num_threads(), torch.is_autocast_enabled(target.device.type)
    held = _found.setdefault(runner, {})
    if state not in held:
        with runner.lock, runner.guard():
            held[state] = worst_difference(runner)
    if held[state] > 0:
        raise ValueError(
            f"strict=True cannot be kept here: scores of this model in {target.dtype} on {target.device.type} depend "
            f"on the other rows of a pass (by {held[state]:.2g}): use float32, or leave strict out and accept that "
            "tokens that are nearly tied may change places."
        )


def worst_difference(runner: Runner, *, row_by_row: bool = True) -> float:
    """Largest difference between scores of passes of one row and of several; 0 for what float32 cannot help.

    Args:
        runner: of a decoder-only model.
        row_by_row: whether rows attend alone.
    """
    target = runner.target
    length = min(sum(WIDTHS), target.max_positions or sum(WIDTHS))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.vocab_size, (1, length), generator=generator, device="cpu").to(target.device)
    alone = _scores(runner, tokens, [1] * length, row_by_row=False)
    worst = float((_scores(runner, tokens, list(WIDTHS), row_by_row=row_by_row) - alone).abs().max())
    exact = alone.dtype == torch.float32 and worst <= FLOAT32 * float(alone.abs().max())
    return 0.0 if exact else worst


def _scores(runner: Runner, tokens: Tensor, widths: list[int], *, row_by_row: bool) -> Tensor:
    """Logits [L, V] of tokens [1, L] that pass so many at a time, in the type that they are made in."""
    cache, device, parts, begin = runner.new_cache(1, tokens.shape[1]), tokens.device, [], 0
    for width in widths:
        end = min(begin + width, tokens.shape[1])
        positions = torch.arange(begin, end, device=device)[None]
        visible = torch.ones(1, end - begin, end - begin, dtype=torch.bool, device=device).tril()
        plan = Plan(tokens[:, begin:end], positions, visible, row_by_row=row_by_row)
        result = runner.run(plan, cache)
        parts.append(result.logits[0])
        cache.commit([list(range(end - begin))], result.segments)
        begin = end
        if begin == tokens.shape[1]:
            break
    return torch.cat(parts)
