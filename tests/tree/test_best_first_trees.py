"""Best-first trees against a slow search of the whole product, with and without a factor off the best path."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_paths import path_of

from draftree.tree import TokenTree

eighth = st.integers(0, 24).map(lambda e: -e / 8)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[int], float]:
    batch, depth, k = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = st.lists(eighth, min_size=k, max_size=k).map(lambda row: sorted(row, reverse=True))
    logp = np.array([[draw(rows) for _ in range(depth)] for _ in range(batch)], np.float32)
    cut = draw(st.integers(0, depth))  # the first request has no candidates from this depth on
    logp[0, cut:] = -np.inf
    tokens = np.arange(batch * depth * k).reshape(batch, depth, k)
    return (
        tokens,
        logp,
        draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch)),
        draw(st.sampled_from([1.0, math.exp(-0.5), math.exp(-2.0)])),
    )


def everything(tokens: np.ndarray, logp: np.ndarray, off_path: float) -> dict[tuple[int, ...], float]:
    """Log-probability of every path of one request's candidates [D, K]."""
    found = {}
    for depth in range(1, len(tokens) + 1):
        for ranks in itertools.product(range(tokens.shape[1]), repeat=depth):
            strays = sum(any(ranks[:d]) for d in range(1, depth))
            score = sum(float(logp[d, r]) for d, r in enumerate(ranks)) + strays * math.log(off_path)
            if score > -math.inf:
                found[tuple(int(tokens[d, r]) for d, r in enumerate(ranks))] = score
    return found


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_best_nodes_of_the_whole_product(case: tuple[np.ndarray, np.ndarray, list[int], float]) -> None:
    tokens, logp, budgets, off_path = case
    roots = torch.arange(500, 500 + len(tokens))
    tree = TokenTree.from_candidates(roots, tokens, logp, budgets, 4, off_path)
    for b, budget in enumerate(budgets):
        known = everything(tokens[b], logp[b], off_path)
        size = tree.sizes[b]
        assert size - 1 == min(budget, len(known))
        paths = [tuple(path_of(tree, b, node)[1:]) for node in range(1, size)]
        assert len(set(paths)) == len(paths)
        scores = tree.logp[b, 1:size].tolist()
        assert scores == pytest.approx([known[path] for path in paths], abs=1e-5)
        assert scores == pytest.approx(sorted(known.values(), reverse=True)[: size - 1], abs=1e-5)
        assert int(tree.tokens[b, 0]) == 500 + b
        assert (tree.source[b, 1:size] == 4).all()
        padding = [getattr(tree, name)[b, size:] for name in ("tokens", "parents", "logp", "source")]
        assert all((p == fill).all() for p, fill in zip(padding, (0, -1, -torch.inf, 0), strict=True))
