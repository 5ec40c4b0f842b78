"""The compiled twin of the tree operations that every step needs on the CPU (`native/tree.c`)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftree.native import library as load
from draftree.native.addresses import address, array_address

if TYPE_CHECKING:
    from draftree.tree.token_tree import TokenTree

ABI = 3


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled twin, ready for calls; None when it was not built, is stale or does not load."""
    try:
        found = load()
        found.tree_abi.restype = c_int32
        if found.tree_abi() != ABI:
            return None
    except (OSError, AttributeError):
        return None
    pointers: list[Any] = [c_void_p] * 3
    found.tree_structure.restype, found.tree_walk.restype, found.tree_first.restype = c_int64, c_int32, None
    found.tree_first.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p]
    found.tree_structure.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p]
    found.tree_walk.argtypes = [*pointers, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p]
    pointers = [c_void_p] * 3
    found.tree_best_first.restype = None
    found.tree_best_first.argtypes = [
        *(*pointers, c_int64, c_int64, c_void_p, c_int64, c_int64, c_double, c_int64),
        *pointers,
    ]
    return found


def structure(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Depth [B, N], ancestors [B, N, N] and the largest depth of parents (int64 [B, N]); None without the library."""
    found = library()
    if found is None:
        return None
    parents = np.ascontiguousarray(parents)
    batch, width = parents.shape
    depth, seen = np.empty((batch, width), np.int64), np.empty((batch, width, width), bool)
    to = array_address(depth, np.int64), array_address(seen, np.bool_)
    height: int = found.tree_structure(array_address(parents, np.int64), batch, width, *to)
    return depth, seen, height


def empty_columns(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Room for C to write trees into: LongTensor [3, B, N] of tokens, parents and sources, and float32 [B, N]."""
    ids = torch.empty(3, batch, width, dtype=torch.long, device="cpu")
    return ids, torch.empty(batch, width, dtype=torch.float32, device="cpu")


def first(tree: TokenTree, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Tokens, parents, log-probabilities and sources of the first sizes[b] nodes of each tree, padded to the largest.

    None without the library, and for trees that do not lie on the CPU one row behind the other.
    """
    found = library()
    parts = (tree.tokens, tree.parents, tree.source, tree.logp)
    if found is None or not (tree.tokens.is_cpu and all(part.is_contiguous() for part in parts)):
        return None
    batch, width = len(sizes), max(sizes)
    ids, logp = empty_columns(batch, width)
    many, three = c_int64 * batch, c_void_p * 3
    at, to = [address(part, torch.long) for part in parts[:3]], (address(ids, torch.long), address(logp, torch.float32))
    found.tree_first(three(*at), address(tree.logp, torch.float32), tree.width, many(*sizes), batch, width, *to)
    tokens, parents, source = ids.unbind()
    return tokens, parents, logp, source


def walks(parents: Tensor, tokens: Tensor, sizes: Sequence[int], best: Tensor) -> list[list[int]] | None:
    """The nodes that each tree's walk passes, from its root on.

    None where siblings on the way share a token, and without the library.

    Args:
        parents: LongTensor [B, N] on the CPU.
        tokens: alike.
        sizes: real nodes of each tree.
        best: LongTensor [B, N or more], the model's choice after each node.
    """
    found = library()
    if found is None:
        return None
    batch, width = parents.shape
    many = c_int64 * batch
    nodes, counts = (c_int64 * (batch * width))(), many()
    parents, tokens, best = parents.contiguous(), tokens.contiguous(), best.contiguous()
    if found.tree_walk(
        *(address(parents, torch.long), address(tokens, torch.long), many(*sizes), batch, width),
        *(address(best, torch.long), best.shape[1], nodes, counts),
    ):
        return None
    return [nodes[b * width : b * width + count] for b, count in enumerate(counts)]


def best_first(
    roots: Sequence[int],
    tokens: np.ndarray,
    logp: np.ndarray,
    budgets: Sequence[int],
    source: int,
    off_path: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]] | None:
    """Tokens, parents, log-probabilities, sources and sizes of the most probable trees of candidates.

    None without the library, and without memory. See `draftree.shaping.best_first` for the arguments; tokens int64 and
    logp float32.
    """
    found = library()
    if found is None:
        return None
    batch, depth, count = tokens.shape
    width = 1 + max(*budgets, 0)
    many = c_int64 * batch
    (ids, kept), counts = empty_columns(batch, width), many()
    tokens, logp = np.ascontiguousarray(tokens, np.int64), np.ascontiguousarray(logp, np.float32)
    at = array_address(tokens, np.int64), array_address(logp, np.float32)
    found.tree_best_first(
        *(many(*roots), *at, depth, count, many(*budgets), batch, width),
        *(math.log(off_path), source, address(ids, torch.long), address(kept, torch.float32), counts),
    )
    if counts[0] < 0:
        return None
    sizes = tuple(1 + made for made in counts)
    if max(sizes) < width:
        ids, kept = ids[:, :, : max(sizes)].contiguous(), kept[:, : max(sizes)].contiguous()
    return ids[0], ids[1], kept, ids[2], sizes
