"""The most probable tree of per-depth candidates, knowing that below a second choice guesses hold less often.

Drafters that guess several depths in one pass (BiTA, Hidden Transfer, Medusa) do not know which candidate will be
taken: their guesses for depth d + 1 are made, in effect, for the best one of depth d. Below any other candidate they
hold less often, by a factor that is learned from the text. It is why BiTA's efficient tree beats the full one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from draftree.tree import TokenTree, compiled

FIRST, WEIGHT = 0.5, 20.0  # the factor at first, and how many cases that counts for
FORGET = 0.99  # weight of the past, per case
LEAST = 0.02  # of the factor, so that it can rise again


class _Superset(NamedTuple):
    """Nodes that may be among the best n, whatever the probabilities; parents first.

    Attributes:
        path: [D, T], the candidates on the way, numbered d K + rank; D K where there is no further one.
        last: [T], the node's own candidate.
        parent: [T], -1 for the root.
        strays: [T], steps below a candidate that was not the best of its depth.
    """

    path: np.ndarray
    last: np.ndarray
    parent: np.ndarray
    strays: np.ndarray


@lru_cache(maxsize=64)
def _superset(depth: int, k: int, budget: int) -> _Superset:
    """A node of ranks r is outranked by all of ranks s <= r and their prefixes: sum over depths of prod (r_i + 1)."""
    nodes: list[tuple[int, ...]] = []
    level: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]  # ranks, product, sum
    for _ in range(depth):
        below = []
        for ranks, product, total in level:
            for r in range(k):
                if total + product * (r + 1) > budget:
                    break
                below.append(((*ranks, r), product * (r + 1), total + product * (r + 1)))
        nodes += [ranks for ranks, *_ in below]
        level = below
    place = {ranks: i for i, ranks in enumerate(nodes)} | {(): -1}
    return _Superset(
        np.array(
            [[*(d * k + rank for d, rank in enumerate(r)), *[depth * k] * (depth - len(r))] for r in nodes]
        ).T.copy(),
        np.array([(len(r) - 1) * k + r[-1] for r in nodes]),
        np.array([place[r[:-1]] for r in nodes]),
        np.array([next((len(r) - 1 - i for i, rank in enumerate(r) if rank), 0) for r in nodes]),
    )


def best_first(
    roots: Sequence[int],
    tokens: np.ndarray,
    logp: np.ndarray,
    budgets: Sequence[int],
    source: int = 1,
    off_path: float = 1.0,
) -> TokenTree:
    """The best nodes of the product tree of candidates, best first.

    Args:
        roots: B token ids.
        tokens: [B, D, K], different tokens at each depth, best first.
        logp: [B, D, K], falling; -inf where there is no candidate.
        budgets: most guesses per request.
        source: bit of the drafter.
        off_path: factor on a guess's probability for each step below a candidate that was not the best of its depth.
    """
    made = compiled.best_first(roots, tokens, logp, budgets, source, off_path)
    return TokenTree(*made) if made is not None else _best_first(roots, tokens, logp, budgets, source, off_path)


def _best_first(
    roots: Sequence[int], tokens: np.ndarray, logp: np.ndarray, budgets: Sequence[int], source: int, off_path: float
) -> TokenTree:
    """The same in array operations: all nodes that may be among the best are scored and sorted."""
    batch, depth, k = logp.shape
    most = max(budgets, default=0)
    held = _superset(depth, k, 1 << max(most - 1, 0).bit_length())
    steps = np.zeros((batch, depth * k + 1))
    steps[:, :-1] = logp.reshape(batch, -1)
    scores = steps.take(held.path[0], 1)
    for further in held.path[1:]:
        scores += steps.take(further, 1)
    scores += held.strays * math.log(off_path)
    order = (-scores).argsort(axis=1, kind="stable")[:, :most]  # stable: parents before children that tie
    rows = np.arange(batch)[:, None]
    scores = scores[rows, order]
    counts = [min(n, budget) for n, budget in zip((scores > -np.inf).sum(1).tolist(), budgets, strict=True)]
    width = 1 + max(counts)
    order, scores = order[:, : width - 1], scores[:, : width - 1]
    place = np.zeros((batch, len(held.parent) + 1), np.int64)  # the last column is the root's
    place[rows, order] = np.arange(1, width)
    guesses = tokens.reshape(batch, -1)[rows, held.last[order]]
    above = place[rows, held.parent[order]]
    bits = np.full_like(above, source)
    if min(counts) < width - 1:
        padding = np.arange(1, width) > np.array(counts)[:, None]
        guesses[padding], above[padding], scores[padding], bits[padding] = 0, -1, -np.inf, 0
    return TokenTree(
        _columns(roots, guesses),
        _columns(-1, above),
        _columns(0.0, scores.astype(np.float32)),
        _columns(0, bits),
        tuple(1 + count for count in counts),
    )


def _columns(root: Any, guesses: np.ndarray) -> torch.Tensor:
    """[B, 1 + n] from what the roots hold (a number, or [B]) and the guesses [B, n]."""
    held = np.empty((len(guesses), 1 + guesses.shape[1]), guesses.dtype)
    held[:, 0], held[:, 1:] = root, guesses
    return torch.from_numpy(held)


class OffPath:
    """Learns from the text how much less often guesses hold below a candidate that was not the best of its depth.

    Candidates are compared with what came, verified or not; lossless decoding makes that exact.
    """

    def __init__(self) -> None:
        # Of guesses below best candidates, and below others: the probability they claimed, and how often they held.
        self._hoped = [WEIGHT, WEIGHT]
        self._came = [WEIGHT, WEIGHT * FIRST]

    @property
    def factor(self) -> float:
        """`off_path` of `best_first`: at most 1."""
        on, off = (came / hoped for came, hoped in zip(self._came, self._hoped, strict=True))
        return min(max(off / on, LEAST), 1.0)

    def learn(self, tokens: np.ndarray, logp: np.ndarray, text: Sequence[int]) -> None:
        """Candidates [D, K] and the tokens that came in their places (as many as there are, up to D)."""
        stray = 0
        sums = np.exp(logp).sum(1).tolist()
        for depth, token in enumerate(text[: len(tokens)]):
            ranks: list[int] = tokens[depth].tolist()
            rank = ranks.index(token) if token in ranks else -1
            if depth:
                self._hoped[stray] = FORGET * self._hoped[stray] + sums[depth]
                self._came[stray] = FORGET * self._came[stray] + (rank >= 0)
            if rank < 0:
                return
            stray |= rank > 0
