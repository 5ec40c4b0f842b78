"""Strict mode: in 16 bits an answer has, bit for bit, the scores of plain decoding alone.

In 16 bits a row's logits change in their last bits with the other rows of a pass, and two tokens that are nearly tied
may change places. With `strict` nothing of a pass depends on what else is in it:

- Each row attends alone, over its context and its branch, as it would in a pass of one row (`Plan.row_by_row`).
- A prompt passes without draft tokens and without other requests, in chunks of one size.
- Matrix products must not depend on the number of rows. Our own do not (runners `cpu` and, on a GPU, `cuda_graphs`);
  torch's do on GPUs, and on some processors for some shapes. So the model is tried once: the same tokens row by row,
  and among other rows. Where the scores differ, `strict` is refused.

An answer is then the one that the engine gives to that prompt alone without a drafter, in any batch.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from draftree.drafting import Drafter
from draftree.errors import brief
from draftree.runner import Runner, open_runner
from draftree.runner.plan import PassResult, Plan

WIDTHS = (1, 2, 5, 16)  # tokens of the passes that are compared with passes of one row, each with a sibling
BATCHES = (1, 5)  # requests in them
FLOAT32 = 1e-4  # of the largest score: in float32 sums move by so much less than any two tokens lie apart
VAST = 1e38  # a difference from a score that is no number, or infinite

_found: weakref.WeakKeyDictionary[Runner, dict[tuple[int, bool], str | None]] = weakref.WeakKeyDictionary()


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
            held[state] = _trouble(runner)
    if held[state] is not None:
        raise ValueError(
            f"strict=True cannot be kept here, {held[state]}: use float32, or leave strict out and accept that tokens "
            "that are nearly tied may change places."
        )


def strict_runner(model: Any, choice: str | Runner, runner: Runner, drafter: Drafter) -> Runner:
    """The runner that keeps the promise with a bound drafter: `runner`, or another where "auto" leaves the choice.

    Args:
        model, choice: by which `runner` was opened; of a choice that is a runner itself, "auto" would have opened it.
        runner: what was opened.
        drafter: after `bind`.

    Raises:
        ValueError: a drafter with a deep prefix, in passes of fixed shapes that were asked for by name.
    """
    target = runner.target
    if runner.name != "cuda_graphs" or target.dtype == torch.float32 or drafter.deep_prefix(target) is None:
        return runner
    if choice != "auto" and choice is not open_runner(model, "auto"):
        raise ValueError(
            "strict=True cannot be kept in passes of fixed shapes with a drafter that has a deep prefix: give "
            "runner='eager'."
        )
    other = open_runner(model, "eager")
    check_strict(other)
    return other


def _trouble(runner: Runner) -> str | None:
    """Why a runner's passes are not to be relied on; None where they are."""
    where = f"{str(runner.target.dtype).removeprefix('torch.')} on {runner.target.device.type}"
    try:
        worst = worst_difference(runner)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # such as Doge's, whose masks have one row for each key-value head
        return f"as attention of this '{runner.target.model_type}' model cannot be taken row by row ({brief(error)})"
    if math.isinf(worst):
        return f"as this '{runner.target.model_type}' model in {where} does not attend by torch's scaled dot product"
    return f"as scores of this model in {where} depend on the other rows of a pass (by {worst:.2g})" if worst else None


def worst_difference(runner: Runner, *, row_by_row: bool = True) -> float:
    """Largest difference between scores of passes of one row and of many; 0 for what float32 cannot help.

    The runner is of a decoder-only model; rows attend alone where it is `row_by_row`. Infinite where they are to and
    did not in 16 bits, where scores that agree by luck prove nothing.
    """
    target = runner.target
    length = min(sum(WIDTHS), target.max_positions or sum(WIDTHS))
    generator = torch.Generator().manual_seed(0)
    tokens, others = torch.randint(0, target.vocab_size, (2, length), generator=generator, device="cpu")
    alone = _one_by_one(runner, tokens.to(target.device), row_by_row=row_by_row)
    worst = 0.0
    for batch in BATCHES:
        passes = _among_others(runner, tokens.to(target.device), others.to(target.device), batch, row_by_row=row_by_row)
        if target.dtype != torch.float32 and not all(result.attends_apart for result in passes):
            return math.inf
        found = torch.cat([result.logits[0, 1::2] for result in passes])
        alike = (found == alone) | (found.isnan() & alone.isnan())
        apart = (found.float() - alone.float()).abs().nan_to_num(VAST, VAST)
        worst = max(worst, float(apart.masked_fill(alike, 0).max()))
    largest = alone.abs().nan_to_num(0.0, 0.0).max()  # of those that are finite
    exact = alone.dtype == torch.float32 and worst <= FLOAT32 * float(largest)
    return 0.0 if exact else worst


def _one_by_one(runner: Runner, tokens: Tensor, *, row_by_row: bool) -> Tensor:
    """Logits [L, V] behind each of `tokens` [L], each in a pass of its own."""
    cache, found = runner.new_cache(1, len(tokens)), []
    for i, token in enumerate(tokens):
        result = runner.run(Plan.causal(token.view(1, 1), i, row_by_row=row_by_row), cache)
        found.append(result.logits[0, 0])
        cache.commit([[0]], result.segments)
    return torch.stack(found)


def _among_others(runner: Runner, tokens: Tensor, others: Tensor, batch: int, *, row_by_row: bool) -> list[PassResult]:
    """Passes over the same in trees: every token has one of `others` [L] as a sibling before it, in `batch` requests.

    All but the first request are one token ahead, so that their contexts end at other columns.
    """
    device, found, begin = tokens.device, [], 0
    cache = runner.new_cache(batch, len(tokens) + 2 * max(WIDTHS))
    if batch > 1:
        for slot in range(1, batch):
            ahead = runner.run(Plan.causal(others[:1].view(1, 1)), cache, slot)
            cache.commit([[0]], ahead.segments)
    for width in WIDTHS:
        width = min(width, len(tokens) - begin)
        if width == 0:
            break
        own = slice(begin, begin + width)
        drafted = torch.stack([others[own], tokens[own]], 1).view(1, -1).expand(batch, -1)
        positions = torch.arange(begin, begin + width, device=device).repeat_interleave(2)[None].repeat(batch, 1)
        positions[1:] += 1
        visible = torch.zeros(2 * width, 2 * width, dtype=torch.bool, device=device)
        visible[1::2, 1::2] = visible[::2, 1::2] = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        visible[::2, 1::2].fill_diagonal_(fill_value=False)
        visible.fill_diagonal_(fill_value=True)
        plan = Plan(drafted, positions, visible[None].expand(batch, -1, -1), row_by_row=row_by_row)
        result = runner.run(plan, cache)
        found.append(result)
        cache.commit([list(range(1, 2 * width, 2))] * batch, result.segments)
        begin += width
    return found
