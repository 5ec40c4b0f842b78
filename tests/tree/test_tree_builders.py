"""Every builder of trees, against the slow model; user mistakes are named in one sentence."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_model import QUARTERS, TOKENS, Model, batches, merged, models, read

from draftree.tree import TokenTree

ROOTS = st.lists(TOKENS, min_size=1, max_size=3)


@given(ROOTS)
def test_roots_are_trees_of_one(tokens):
    tree = TokenTree.roots(torch.tensor(tokens))
    assert [read(tree, b) for b in range(tree.batch)] == [Model([t], [-1], [0.0], [0]) for t in tokens]
    assert tree.height == 0
    assert tree.best(4).sizes == tree.sizes


def chain(root, path, logp, source):
    """A path as a model of its own."""
    sums = [0.0, *itertools.accumulate(logp)]
    return Model([root, *path], [-1, *range(len(path))], sums, [0] + [source] * len(path))


@given(TOKENS, st.lists(st.lists(st.tuples(TOKENS, QUARTERS), max_size=5), max_size=6))
def test_from_paths_merges_prefixes(root, drawn):
    paths = [[token for token, _ in path] for path in drawn]
    logp = [[score for _, score in path] for path in drawn]
    tree = TokenTree.from_paths(root, paths, logp, 2)
    model = read(tree)
    chains = [chain(root, *each, 2) for each in zip(paths, logp, strict=True)]
    union = merged([Model([root], [-1], [0.0], [0]), *chains])
    assert model.named() == union
    appearance = dict.fromkeys([(root,), *((root, *p[:d]) for p in paths for d in range(1, len(p) + 1))])
    assert [model.path(i) for i in range(len(model))] == list(appearance)
    assert set(TokenTree.from_paths(root, paths).logp[0].tolist()) == {0.0}


def test_from_paths_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="shape"):
        TokenTree.from_paths(0, [[1, 2]], [[-1.0]])


@st.composite
def choice_lists(draw, depth, count):
    """A list closed under prefixes, in any order, perhaps with repeats."""
    ends = draw(st.lists(st.lists(st.integers(0, count - 1), min_size=1, max_size=depth), max_size=6))
    closed = [tuple(end[:d]) for end in ends for d in range(1, len(end) + 1)]
    return draw(st.permutations(closed))


@given(ROOTS, st.data())
def test_from_choices_names_nodes_by_rank(roots, data):
    depth, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    listed = data.draw(choice_lists(depth, count))
    rows = st.permutations(range(4)).map(lambda order: order[:count])
    scores = st.lists(QUARTERS, min_size=count, max_size=count)
    candidates = [[data.draw(rows) for _ in range(depth)] for _ in roots]
    logp = [[data.draw(scores) for _ in range(depth)] for _ in roots]
    tree = TokenTree.from_choices(torch.tensor(roots), torch.tensor(candidates), listed, torch.tensor(logp), source=4)
    order = sorted(set(listed), key=lambda c: (len(c), c))
    for b, root in enumerate(roots):
        model = read(tree, b)
        for i, choice in enumerate(order, 1):
            assert model.path(i) == (root, *(candidates[b][d][rank] for d, rank in enumerate(choice)))
            assert model.logp[i] == sum(logp[b][d][rank] for d, rank in enumerate(choice))
            assert model.source[i] == 4
            assert tree.depth[b, i] == len(choice)
        assert len(model) == len(order) + 1


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([(0,), (1, 0)], "prefix"),
        ([(0, 0)], "prefix"),
        ([(0,), (0, -1)], "rank"),
        ([()], "rank"),
        ([(2,)], "draft more candidates"),
        ([(0,), (0, 0), (0, 0, 0)], "draft more candidates"),
    ],
)
def test_from_choices_refuses(listed, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.from_choices(torch.tensor([1]), torch.tensor([[[5, 6], [7, 8]]]), listed, torch.zeros(1, 2, 2))


def test_from_candidates_refuses():
    roots, candidates, logp = torch.tensor([1]), np.array([[[5, 6]]]), np.array([[[-1.0, -2.0]]])
    with pytest.raises(ValueError, match="node_budget"):
        TokenTree.from_candidates(roots, candidates, logp, [1, 2])
    with pytest.raises(ValueError, match="node_budget"):
        TokenTree.from_candidates(roots, candidates, logp, -1)


def test_candidates_of_no_probability():
    logp = np.array([[[-1.0, float("nan"), float("-inf")], [float("nan"), -2.0, -0.5]]])
    tree = TokenTree.from_candidates(torch.tensor([1]), np.array([[[5, 6, 7], [8, 9, 10]]]), logp, 9)
    model = read(tree)
    assert sorted(map(model.path, range(len(model)))) == [(1,), (1, 5), (1, 5, 9), (1, 5, 10)]


@given(batches(), batches())
def test_stack_keeps_each_tree(first, second):
    tree = TokenTree.stack([TokenTree.stack([m.tree() for m in first]), TokenTree.stack([m.tree() for m in second])])
    assert [read(tree, b) for b in range(tree.batch)] == first + second


def test_stack_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        TokenTree.stack([])


@given(st.lists(models(connected=True), min_size=1, max_size=4), st.data())
def test_from_drafts_takes_the_likeliest_in_order(batch, data):
    budgets = [data.draw(st.integers(0, 16)) for _ in batch]
    drafts = [(m.tokens[1:], [p - 1 for p in m.parents[1:]], m.logp[1:], m.source[1:]) for m in batch]
    tree = TokenTree.from_drafts([m.tokens[0] for m in batch], drafts, budgets)
    for b, (model, budget) in enumerate(zip(batch, budgets, strict=True)):
        order = sorted(range(1, len(model)), key=lambda i: (-model.logp[i], i))[:budget]
        found = read(tree, b)
        assert [found.path(i) for i in range(len(found))] == [model.path(i) for i in [0, *order]]
        assert found.logp == [model.logp[i] for i in [0, *order]]
        assert found.source == [model.source[i] for i in [0, *order]]


def test_from_drafts_leaves_out_what_cannot_be_and_takes_one_source_for_all():
    draft = ([5, 6, 7], [-1, 0, -1], [-1.0, -math.inf, -0.5], 4)
    tree = TokenTree.from_drafts([1, 2], [draft, ([], [], [], 4)], [9, 9])
    assert tree.sizes == (3, 1)
    assert tree.tokens.tolist() == [[1, 7, 5], [2, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0], [-1, -1, -1]]
    assert tree.source.tolist() == [[0, 4, 4], [0, 0, 0]]
