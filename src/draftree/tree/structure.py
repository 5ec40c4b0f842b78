"""Who sees whom in a batch of trees: depths and ancestor masks, from the parent array alone.

Both come from pointer jumping (each round doubles how far up a node has looked), so the cost is a few
array operations per doubling of the depth and never a loop over nodes. It is done on the CPU, wherever the trees are.
Decoding asks for the same few shapes over and over (chains, static trees, small trie answers), so what was worked
out is kept in a bounded cache under the bytes of the parent array, copies on other devices included.

`laid_out` and `likeliest` make the arrays of a batch from the draft tokens of each request. What the user hands in is
checked by the builders, once; everything after trusts the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

KEPT = 256  # structures in the cache; shapes that come back do so soon
LARGEST = 1 << 16  # bytes of ancestor masks that are kept: 16 trees of 64 nodes


class Structure(NamedTuple):
    """Shared between trees of equal shape, hence read-only.

    depth: LongTensor [B, N]; ancestors: BoolTensor [B, N, N]; height: the largest depth.
    """

    depth: Tensor
    ancestors: Tensor
    height: int


def structure_of(parents: Tensor, device: torch.device | None = None) -> Structure:
    """Return the structure of `parents` (LongTensor [B, N], -1 for roots and padding) on `device` (None: theirs).

    Parents that are not on the CPU are copied to it, which waits for their device.
    """
    device = parents.device if device is None else device
    array = parents.cpu().numpy()
    make = _kept if array.size * array.shape[1] <= LARGEST else _kept.__wrapped__
    return make(array.tobytes(), *array.shape, None if device.type == "cpu" else device)


@lru_cache(maxsize=KEPT)
def _kept(parents: bytes, batch: int, width: int, device: torch.device | None) -> Structure:
    """Return the structure of some trees from the bytes of their parents, on `device` (None: the CPU)."""
    found = on_cpu(np.frombuffer(parents, np.int64).reshape(batch, width))
    if device is None:
        return found
    return found._replace(depth=moved(found.depth, device), ancestors=moved(found.ancestors, device))


def on_cpu(parents: np.ndarray) -> Structure:
    """Jump pointers in numpy, where small arrays cost a third of torch's time."""
    batch, width = parents.shape
    check_parents(parents)
    total = batch * width
    # One flat forest with a sink at the end: everything above a root is the sink, which sees nothing.
    jump = np.full(total + 1, total)
    rows = jump[:total].reshape(batch, width)
    np.copyto(rows, parents + np.arange(0, total, width)[:, None], where=parents >= 0)
    seen = np.zeros((total + 1, width), dtype=bool)
    seen[:total].reshape(batch, width * width)[:, :: width + 1] = True
    while jump.min() != total:
        seen |= seen[jump]
        jump = jump[jump]
    depth = seen[:total].sum(1) - 1
    return Structure(
        torch.from_numpy(depth.reshape(batch, width)),
        torch.from_numpy(seen[:total].reshape(batch, width, width)),
        int(depth.max(initial=0)),
    )


def check_parents(parents: np.ndarray) -> None:
    """Refuse nodes that do not come behind their parents, [B, N]."""
    if (parents >= np.arange(parents.shape[1])).any():
        raise ValueError(
            "A draft tree has a node that does not stand behind its parent: parents are numbers of draft tokens, from "
            "0 on (-1 for the root), and no draft token may have a higher path log-probability than its parent."
        )


def any_above(structure: Structure, flags: Tensor) -> Tensor:
    """Flag each node that is flagged or has a flagged ancestor; flags and the result are BoolTensors [B, N]."""
    if flags.is_cpu:
        # numpy's boolean product stops at the first hit; torch's `any` over rows is 10 to 40 times slower.
        return torch.from_numpy(np.matmul(structure.ancestors.numpy(), flags.numpy()[:, :, None])[:, :, 0])
    return (structure.ancestors & flags[:, None, :]).any(-1)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move `tensor` to `device`; wait only if the CPU could read it too early."""
    return tensor.to(device, non_blocking=device.type == "cuda")


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
