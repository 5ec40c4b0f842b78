"""The arrays of a batch of trees, from the draft tokens of each request.

What the user hands in is checked by the builders, once; everything after trusts the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.tree.structure import Structure

Fields = tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Structure | None]
"""What a `TokenTree` holds, in its order."""

NOTHING = float("-inf")
PADDING = (0, -1, NOTHING, 0)  # of tokens, parents, log-probabilities and sources

Numbers = Sequence[int] | Sequence[float] | np.ndarray
Draft = tuple[Numbers, Numbers, Numbers | float, Numbers | int]
"""Tokens, parents (-1: the root), path log-probabilities and sources of one request's draft tokens."""


def laid_out(root_tokens: Sequence[int], drafts: Sequence[Draft]) -> Fields:
    """Build a tree for each root and draft, padded to the largest; parents come before their children."""
    sizes = tuple(1 + len(draft[0]) for draft in drafts)
    shape = (len(sizes), max(sizes, default=1))
    kinds = (np.int64, np.int64, np.float32, np.int64)
    columns = [np.full(shape, fill, kind) for fill, kind in zip(PADDING, kinds, strict=True)]
    for b, (size, draft) in enumerate(zip(sizes, drafts, strict=True)):
        for column, values in zip(columns, draft, strict=True):
            column[b, 1:size] = values
        columns[1][b, 1:size] += 1  # the root stands in front now
    columns[0][:, 0], columns[2][:, 0] = root_tokens, 0.0
    tokens, parents, logp, source = (torch.from_numpy(column) for column in columns)
    return tokens, parents, logp, source, sizes, None


def likeliest(draft: Draft, budget: int) -> Draft:
    """Return the `budget` likeliest draft tokens, in falling order."""
    tokens, parents, logp, source = draft
    chances = np.asarray(logp)
    # Stable, so that a parent precedes a child of equal probability. What cannot be comes last, and is left out.
    order = np.argsort(-chances, kind="stable")[: min(budget, np.count_nonzero(chances > NOTHING))]
    place = np.full(len(chances) + 1, -1)  # the last entry is the root's, which parents name by -1
    place[order] = np.arange(len(order))
    masks = source if isinstance(source, int) else np.asarray(source)[order]
    return np.asarray(tokens)[order], place[np.asarray(parents, dtype=np.int64)[order]], chances[order], masks


def per_request(value: int | Sequence[int], batch: int, name: str) -> list[int]:
    """Return `value` once for each request, checked."""
    values = [int(value)] * batch if isinstance(value, int | np.integer) else [int(v) for v in value]
    if len(values) != batch or min(values, default=0) < 0:
        raise ValueError(f"{name} must be one number >= 0, or one for each of the {batch} requests.")
    return values
