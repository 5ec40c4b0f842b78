"""Counts of guesses that came true: the compiled form is the plain one, to the last tree."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from draftree.shaping import counts
from draftree.shaping.average import Average
from draftree.shaping.compiled import library
from draftree.tree import TokenTree


def test_the_compiled_counts_are_the_plain_ones() -> None:
    compiled_library = library()
    if compiled_library is None:
        pytest.skip("draftree was built without a C compiler")
    plain, compiled = counts.Counts(), counts.CompiledCounts(compiled_library)
    random = np.random.default_rng(3)
    taken = 0
    for step in range(300):
        n = int(random.integers(1, 40))
        parents = [int(random.integers(-1, i)) if i else -1 for i in range(n)]
        logp = np.sort(-random.exponential(random.choice([0.2, 1.0, 4.0]), n).astype(np.float32))[::-1]
        tokens = random.integers(0, 3, n)  # siblings may share a token
        tree = TokenTree.from_arrays(tokens, parents, logp, root=1)
        check_plans(plain, compiled, tree, random)
        drafted = counts.Drafted(2, TokenTree.stack([TokenTree.from_arrays([], [], root=0), tree]), 1)
        text = [7, 1, *random.integers(0, 3, int(random.integers(0, 6))).tolist()]
        ended = bool(random.random() < 0.5) and len(text) > 2
        lesson = plain.learn(drafted, text, ended=ended)
        assert compiled.learn(drafted, text, ended=ended) == (None if lesson is None else pytest.approx(lesson))
        np.testing.assert_allclose(compiled.seen, plain.seen)
        np.testing.assert_allclose(compiled.right, plain.right)
        taken += lesson is not None and lesson.found > 0
        if step % 16 == 0:
            plain.read()
            compiled.read()
    assert taken > 50
    unsorted = TokenTree.from_arrays([1, 2], [-1, -1], [-2.0, -1.0], root=0)
    for one in (plain, compiled):
        average = Average(0.9)
        assert one.plan(unsorted, [1.0], [average], np.ones(40), packed=True) is None
        assert average.past == 0.0  # it was not counted
    many = TokenTree.stack([tree.first([3])] * 200)  # too many for the compiled form
    averages = [Average(0.9) for _ in range(200)]
    assert compiled.plan(many, [1.0] * 200, averages, np.linspace(1, 9, 5200), packed=True) is not None
    assert {average.past for average in averages} == {0.5}


def check_plans(
    plain: counts.Counts, compiled: counts.CompiledCounts, tree: TokenTree, random: np.random.Generator
) -> None:
    """Of the tree alone, and of a batch with a smaller one and one that takes no part later."""
    both = plain, compiled
    for trees in (tree, TokenTree.stack([tree, tree.first([3]), TokenTree.from_arrays([], [], root=0)])):
        batch = trees.batch
        seconds = np.linspace(1.0, 1.0 + batch * 40 * random.random(), batch * 80)
        trust = random.uniform(0.3, 2.5, batch).tolist()
        pair = [[None if b == 2 else Average(0.9) for b in range(batch)] for _ in range(2)]
        for packed in (True, False):
            for _ in range(2):  # the first tree, and one that is averaged with it
                expected, found = (
                    one.plan(trees, trust, averages, seconds, packed=packed)
                    for one, averages in zip(both, pair, strict=True)
                )
                assert expected is not None
                assert found is not None
                assert found.sizes == expected.sizes
                assert found.gains == pytest.approx(expected.gains)
                for ours, theirs in zip(*pair, strict=True):
                    assert (ours is None) == (theirs is None)
                    if ours is not None and theirs is not None:
                        np.testing.assert_allclose(ours.values, theirs.values)


def test_a_plan_is_the_best_of_all_sizes() -> None:
    paths = ([-0.05, -0.1, -0.2], [-0.9, -0.1, -0.1], [-2.5])
    trees = TokenTree.stack([TokenTree.from_paths(0, [[1] * len(logp)], [logp]) for logp in paths])
    chosen = set()
    for one in (counts.Counts(), counts.new_counts()):
        worth = one_worth(one, trees)
        for dear in (0.01, 0.1, 0.2, 0.3, 0.5):
            seconds = 1 + dear * np.arange(100.0)
            for packed in (True, False):
                plans = one.plan(trees, [1.0] * 3, [None] * 3, seconds, packed=packed)
                assert plans is not None
                sizes = plans.sizes
                chosen.add(tuple(sizes))

                def pace(
                    sizes: tuple[int, ...], packed: bool = packed, seconds: np.ndarray = seconds, worth: Any = worth
                ) -> float:
                    rows = 3 + sum(sizes) if packed else 3 * (1 + max(sizes))
                    gain = 3 + sum(float(of[:size].sum()) for of, size in zip(worth, sizes, strict=True))
                    return gain / float(seconds[rows - 1])

                best = max(map(pace, itertools.product(*(range(len(of) + 1) for of in worth))))
                assert pace(tuple(sizes)) == pytest.approx(best)
    assert len(chosen) > 4


def one_worth(one: counts.Counts, trees: TokenTree) -> list[np.ndarray]:
    return [one.worth(trees.logp[b, 1:size].numpy(), 1.0) for b, size in enumerate(trees.sizes)]
