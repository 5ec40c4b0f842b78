"""How trees come to be: from flat arrays, token paths, drafts of many requests, or other trees.

Each builder returns the plain fields of a `TokenTree`, whose class methods carry the documentation.
What the user hands in is checked here, once; everything after trusts the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional as F

from draftree.tree.arrays import TreeArrays
from draftree.tree.structure import Structure, structure_of

Fields = tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Structure | None]
NOTHING = float("-inf")
PADDING = (0, -1, NOTHING, 0)  # of tokens, parents, log-probabilities and sources

Numbers = Sequence[int] | Sequence[float] | np.ndarray
Draft = tuple[Numbers, Numbers, Numbers | float, Numbers | int]
"""Tokens, parents (-1: the root), path log-probabilities and sources of one request's draft tokens."""


def roots(tokens: Tensor) -> Fields:
    if tokens.ndim != 1:
        raise ValueError(f"Root tokens must be [batch], not {list(tokens.shape)}: pass one token a request.")
    parents, logp, source, structure = _bare(len(tokens), tokens.device)
    return tokens.long()[:, None], parents, logp, source, (1,) * len(tokens), structure


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _bare(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Structure]:
    """Everything but the tokens of trees of a root alone: every step of plain decoding has them."""
    parents = torch.full((batch, 1), -1, device=device, dtype=torch.long)
    certain = torch.zeros(batch, 1, dtype=torch.float32, device=device)
    return parents, certain, torch.zeros_like(parents), structure_of(parents)


def from_arrays(
    tokens: ArrayLike | Tensor,
    parents: ArrayLike | Tensor,
    logp: ArrayLike | Tensor | None,
    source: ArrayLike | Tensor | int | None,
    root: int,
) -> Fields:
    drafted, above = to_numpy(tokens), to_numpy(parents)
    n = drafted.shape[0] if drafted.ndim == 1 else -1
    if n < 0 or above.shape != drafted.shape:
        raise ValueError(
            f"tokens {list(drafted.shape)} and parents {list(above.shape)} must be flat and of one length: "
            "pass one tree without its root."
        )
    if n and (above.min() < -1 or (above >= np.arange(n)).any()):
        raise ValueError("A parent must be -1 (the root) or the index of an earlier node: put parents first.")
    chances = 0.0 if logp is None else _like(logp, n, "logp")
    masks: Any = 1 if source is None else source
    if not isinstance(masks, int | np.integer):
        masks = _like(masks, n, "source")
    return laid_out([root], [(drafted, above, chances, masks)])


def laid_out(root_tokens: Sequence[int], drafts: Sequence[Draft]) -> Fields:
    """A tree for each root and draft, padded to the largest; parents come before their children."""
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


def best_first(root_tokens: Sequence[int], drafts: Sequence[Draft], budgets: Sequence[int]) -> Fields:
    return laid_out(root_tokens, [_best(*draft, budget) for draft, budget in zip(drafts, budgets, strict=True)])


def _best(tokens: Numbers, parents: Numbers, logp: Numbers | float, source: Numbers | int, budget: int) -> Draft:
    """The `budget` likeliest draft tokens, in falling order."""
    chances = np.asarray(logp)
    # Stable, so that a parent precedes a child of equal probability. What cannot be comes last, and is left out.
    order = np.argsort(-chances, kind="stable")[: min(budget, np.count_nonzero(chances > NOTHING))]
    place = np.full(len(chances) + 1, -1)  # the last entry is the root's, which parents name by -1
    place[order] = np.arange(len(order))
    masks = source if isinstance(source, int) else np.asarray(source)[order]
    return np.asarray(tokens)[order], place[np.asarray(parents, dtype=np.int64)[order]], chances[order], masks


def from_paths(
    root: int,
    paths: Sequence[Sequence[int]],
    logp: Sequence[Sequence[float]] | None,
    source: int | Sequence[int],
) -> Fields:
    sources = [source] * len(paths) if isinstance(source, int) else list(source)
    if len(sources) != len(paths) or (logp is not None and [len(p) for p in logp] != [len(p) for p in paths]):
        raise ValueError("logp takes one number a token and source one mask a path: give both the paths' shape.")
    ids: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    masks: list[int] = []
    for p, path in enumerate(paths):
        node, score = -1, 0.0
        for d, token in enumerate(path):
            score += 0.0 if logp is None else float(logp[p][d])
            parent, node = node, ids.setdefault((node, int(token)), len(tokens))
            if node == len(tokens):
                tokens.append(int(token))
                parents.append(parent)
                scores.append(score)
                masks.append(0)
            scores[node] = max(scores[node], score)
            masks[node] |= sources[p]
    return laid_out([int(root)], [(tokens, parents, scores, masks)])


def stack(trees: Sequence[TreeArrays]) -> Fields:
    if not trees:
        raise ValueError("There are no trees to stack: pass at least one.")
    if len(trees) == 1:
        one = trees[0]
        return one.tokens, one.parents, one.logp, one.source, one.sizes, one._structure
    if any(tree.device != trees[0].device for tree in trees):
        raise ValueError("The trees to stack lie on several devices: move them to one first.")
    width = max(tree.width for tree in trees)
    sizes = tuple(size for tree in trees for size in tree.sizes)
    tokens, parents, logp, source = (
        torch.cat([F.pad(getattr(tree, name), (0, width - tree.width), value=fill) for tree in trees])
        for name, fill in zip(("tokens", "parents", "logp", "source"), PADDING, strict=True)
    )
    return tokens, parents, logp, source, sizes, None


def per_request(value: int | Sequence[int], batch: int, name: str) -> list[int]:
    """`value` once for each request, checked."""
    values = [int(value)] * batch if isinstance(value, int | np.integer) else [int(v) for v in value]
    if len(values) != batch or min(values, default=0) < 0:
        raise ValueError(f"{name} must be one number >= 0, or one for each of the {batch} requests.")
    return values


def to_numpy(values: ArrayLike | Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    array = np.asarray(values)
    # An empty list would otherwise arrive as floats.
    return array if array.size else array.astype(np.int64)


def _like(values: ArrayLike | Tensor, n: int, name: str) -> np.ndarray:
    array = to_numpy(values)
    if array.shape != (n,):
        raise ValueError(f"{name} {list(array.shape)} must hold one number for each of the {n} nodes.")
    return array
