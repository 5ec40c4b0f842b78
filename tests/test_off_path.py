"""Best-first trees against a slow search of the whole product, and the factor that is learned."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_paths import path_of

from draftree.drafting.off_path import FIRST, OffPath
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


def test_the_factor_is_learned() -> None:
    """Below the best candidate draft tokens hold as often as they say, below others a quarter as often."""
    generator = np.random.default_rng(0)
    learner = OffPath()
    assert learner.factor == pytest.approx(FIRST)
    tokens = np.array([[1, 2], [3, 4]])
    logp = np.log(np.array([[0.5, 0.4], [0.6, 0.2]], np.float32))
    for _ in range(4000):
        first = generator.choice([1, 2, 9], p=[0.5, 0.4, 0.1])
        holds = generator.random() < (0.8 if first == 1 else 0.2)
        learner.learn(tokens, logp, [first, 3 if holds else 9])
    assert learner.factor == pytest.approx(0.25, abs=0.1)
    for _ in range(3000):
        learner.learn(tokens, logp, [2, 9])
    assert 0 < learner.factor < 0.05


def test_drafts_that_never_hold_leave_a_factor() -> None:
    """What is forgotten of the time before falls below the smallest number."""
    learner = OffPath()
    for _ in range(80_000):
        learner.learn(np.array([[1], [2]]), np.zeros((2, 1)), [1, 3])
    assert learner.factor == 1.0
