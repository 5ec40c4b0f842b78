"""What guesses of a cell bring on the average: of a request, and of those before it."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftree.shaping import average as average_module
from draftree.shaping.average import OTHERS, Average, Taken, learn_steps
from draftree.shaping.compiled import CELLS, LEVELS, PARTS, library
from draftree.tree import TokenTree

ALL = (LEVELS,) * PARTS


def test_nothing_known_is_the_drafters_word_with_doubts() -> None:
    right, there, _ = Average(0.9).values
    rates = (right / there).reshape(PARTS, LEVELS)
    assert (np.diff(rates, axis=0) < 0).all()
    np.testing.assert_allclose(rates[:, 4] / rates[:, 0], np.exp(-1.5))
    assert not Average(0.9).known


def test_an_average_learns_from_trees() -> None:
    average = Average(0.6)
    for worth in ([0.8, 0.4], [0.6], [0.1, 0.1]):
        average.add(np.array(worth), np.arange(len(worth)))
    after_two = np.array([0.7, 0.2])
    np.testing.assert_allclose(average.values[0, :2], 0.6 * after_two + 0.04)
    np.testing.assert_allclose(average.values[1, :3], [1.0, 0.7, 0.0])
    for _ in range(OTHERS):
        average.add(np.array([0.5]), np.array([0]))
    fresh = Average(0.95, average)
    np.testing.assert_allclose(fresh.values[:2], average.values[:2])
    assert fresh.past == OTHERS / (OTHERS + 1)  # the others count as much as a few trees
    assert Average(0.6, Average(0.6)).past == 0.0  # if anything is known of them


def test_an_average_learns_from_steps() -> None:
    """First all bins, then one of the first part; what was not tried follows it."""
    average = Average(0.9)
    right, there = np.zeros(CELLS), np.zeros(CELLS)
    right[[0, 1]], there[[0, 1]] = (600, 100), (1000, 1000)
    average.learn(right, there, 1000, ALL)
    np.testing.assert_allclose(average.values[0, :2], [0.6, 0.1], atol=0.01)
    np.testing.assert_allclose(average.values[1, :3], [1.0, 1.0, 0.0], atol=0.01)
    before = average.values.copy()
    right[0] = 10
    average.learn(right / 10, there / 10, 100, (1, 0, 0))
    assert average.values[0, 0] < 0.1
    assert average.values[0, 1] == pytest.approx(before[0, 1] * average.values[0, 0] / before[0, 0])
    assert average.values[1, 1] == before[1, 1]


def random_steps(random: np.random.Generator, batch: int) -> tuple[list[list[list[int]]], list[TokenTree]]:
    """Walks down random trees, some of which are roots alone."""
    walks, trees = [], []
    for _ in range(int(random.integers(0, 9))):
        parts, walked = [], []
        for _ in range(batch):
            n = int(random.integers(0, 9))
            logp = -np.sort(random.exponential(0.8, n)).astype(np.float32)
            parents = [int(random.integers(-1, i)) if i else -1 for i in range(n)]
            parts.append(TokenTree.from_arrays(random.integers(0, 99, n), parents, logp, root=0))
            node, path = int(random.integers(0, n + 1)), []
            while node >= 0:
                path.append(node)
                node = parents[node - 1] + 1 if node else -1
            walked.append(path[::-1])
        walks.append(walked)
        trees.append(TokenTree.stack(parts))
    return walks, trees


def test_the_compiled_form_learns_what_the_plain_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("draftree was built without a C compiler")
    random = np.random.default_rng(5)
    pairs = [[Average(0.9) for _ in range(5)] for _ in range(2)]
    for step in range(200):
        batch = int(random.integers(1, 5))
        walks, trees = random_steps(random, batch)
        steps = len(trees) + int(random.integers(1, 4))
        taking = random.random(batch) < 0.8
        tried = [tuple(sorted(random.integers(0, LEVELS + 1, PARTS).tolist(), reverse=True)) for _ in range(batch)]
        weight = float(random.choice([1.0, 0.25]))
        for own, compiled in zip(pairs, (library(), None), strict=True):
            monkeypatch.setattr(average_module, "library", lambda compiled=compiled: compiled)
            averages = [of if part else None for of, part in zip(own, taking, strict=False)]
            learn_steps(averages, own[4], Taken(walks, trees, steps, tried), weight)
        for ours, plain in zip(*pairs, strict=True):
            np.testing.assert_allclose(ours.values, plain.values)
            assert ours.tried == pytest.approx(plain.tried)
            assert (plain.values[0] <= plain.values[1] + 1e-9).all()
        if step % 20 == 19:
            for own in pairs:
                own[0] = Average(0.9, own[4])


def test_a_copy_learns_by_itself() -> None:
    """Its values lie elsewhere, and what is compiled writes there."""
    average, usual = Average(0.9), Average(0.99)
    tree = TokenTree.from_paths(0, [[5]], [[-0.1]])
    copied = copy.deepcopy(average)
    before = average.values.copy()
    learn_steps([copied], usual, Taken([[[0, 1]]], [tree], 2, [ALL]), 1.0)
    np.testing.assert_array_equal(average.values, before)
    assert copied.values[1, 0] != before[1, 0]
    learn_steps([average], usual, Taken([[[0, 1]]], [tree], 2, [ALL]), 1.0)
    np.testing.assert_array_equal(average.values, copied.values)
    assert average.tried == copied.tried == 2


def test_trees_that_lie_otherwise_are_learned_from_too() -> None:
    """Log-probabilities of another type, or not one behind the other."""
    tree = TokenTree.from_paths(0, [[5, 6, 7]], [[-0.1, -0.6, -0.9]])
    apart = torch.stack([tree.logp, tree.logp - 9], -1)[..., 0]
    assert not apart.is_contiguous()
    learned = []
    for logp in (tree.logp, tree.logp.double(), apart):
        average = Average(0.9)
        learn_steps([average], Average(0.99), Taken([[[0, 1, 2]]], [replace(tree, logp=logp)], 2, [ALL]), 1.0)
        learned.append(average.values)
    np.testing.assert_allclose(learned[1], learned[0])
    np.testing.assert_allclose(learned[2], learned[0])
