"""How far scores of a row change with the other rows of its pass."""

from __future__ import annotations

import torch
from torch import Tensor

from draftree.runner import Runner
from draftree.runner.plan import PassResult, Plan

WIDTHS = (1, 2, 5, 16)  # tokens of the passes that are compared with passes of one row, each with a sibling
BATCHES = (1, 5)  # requests in them
FLOAT32 = 1e-4  # of the largest score: in float32 sums move by so much less than any two tokens lie apart
VAST = 1e38  # a difference from a score that is no number, or infinite


def worst_difference(runner: Runner, *, row_by_row: bool = True) -> float:
    """Largest difference between scores of passes of one row and of many; 0 for what float32 cannot help.

    The runner is of a decoder-only model; recorded passes attend row by row where it is `row_by_row`.
    """
    target = runner.target
    length = min(sum(WIDTHS), target.max_positions or sum(WIDTHS))
    generator = torch.Generator().manual_seed(0)
    tokens, others = torch.randint(0, target.vocab_size, (2, length), generator=generator, device="cpu")
    alone = _one_by_one(runner, tokens.to(target.device), row_by_row=row_by_row)
    worst = 0.0
    for batch in BATCHES:
        passes = _among_others(runner, tokens.to(target.device), others.to(target.device), batch, row_by_row=row_by_row)
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

    All but the first request are one token ahead, so that their contexts end at other KV positions.
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
