"""Best n and pruning of token trees, against the slow model."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_model import batches, read
from tree_paths import from_arrays

from draftree.tree import TokenTree


def stacked(batch):
    return TokenTree.stack([model.tree() for model in batch])


@given(batches(), st.data())
def test_best_takes_the_most_probable_and_stays_connected(batch, data):
    tree = stacked(batch)
    one = st.integers(0, 16)
    n = data.draw(one | st.lists(one, min_size=len(batch), max_size=len(batch)))
    found = tree.best(n)
    for b, model in enumerate(batch):
        limit = n if isinstance(n, int) else n[b]
        ranked = sorted(range(1, len(model)), key=lambda i: (-model.capped(i), i))[:limit]
        expected, ids = model.keep(ranked)
        assert len(ids) == len(ranked) + 1, "the model's own choice is connected"
        expected.logp = [model.capped(i) for i in ids]
        assert read(found, b) == expected
    again = tree.best(n)
    assert all(torch.equal(getattr(again, name), getattr(found, name)) for name in ("tokens", "parents", "logp"))


@given(batches(), st.data())
def test_first_are_the_first_nodes(batch, data):
    tree = stacked(batch)
    n = data.draw(st.lists(st.integers(0, 8), min_size=len(batch), max_size=len(batch)))
    found = tree.first(n)
    assert found.sizes == tuple(min(count + 1, len(model)) for count, model in zip(n, batch, strict=True))
    assert found.width == max(found.sizes)
    for name, padding in (("tokens", 0), ("parents", -1), ("logp", -math.inf), ("source", 0)):
        for b, size in enumerate(found.sizes):
            row = getattr(found, name)[b].tolist()
            assert row == [*getattr(tree, name)[b, :size].tolist(), *[padding] * (found.width - size)]


def test_best_counts_real_nodes_of_no_probability_before_padding():
    short = from_arrays([3, 4], [-1, -1], [-1.0, -math.inf], root=1)
    long = from_arrays([3, 4, 5, 6], [-1, 0, 1, 2], root=1)
    found = TokenTree.stack([short, long]).best(2)
    assert found.sizes == (3, 3)
    assert found.tokens.tolist() == [[1, 3, 4], [1, 3, 4]]


def test_best_refuses():
    tree = TokenTree.roots(torch.tensor([1, 1]))
    for n in (-1, [1], [1, -1]):
        with pytest.raises(ValueError, match="n must be"):
            tree.best(n)


@given(batches(), st.data())
def test_prune_drops_nodes_with_all_below_them(batch, data):
    tree = stacked(batch)
    row = st.lists(st.sampled_from([True, True, False]), min_size=tree.width, max_size=tree.width)
    keep = [data.draw(row) for _ in batch]
    given_ = torch.tensor(keep)
    found, index = tree.prune(given_)
    assert given_.tolist() == keep, "the argument is left as it was"
    width = 0
    for b, model in enumerate(batch):
        expected, ids = model.keep({i for i in range(len(model)) if keep[b][i]})
        assert read(found, b) == expected
        assert index[b].tolist() == ids + [-1] * (index.shape[1] - len(ids))
        width = max(width, len(ids))
    assert found.width == index.shape[1] == width
    assert found.height == max(read(found, b).depth(i) for b in range(found.batch) for i in range(found.sizes[b]))


def test_prune_of_everything_leaves_the_root():
    tree = from_arrays([0, 0], [-1, 0], root=0)
    found, index = tree.prune(torch.zeros(1, 3, dtype=torch.bool))
    assert (found.tokens.tolist(), index.tolist(), found.sizes) == ([[0]], [[0]], (1,))


def test_prune_refuses_another_shape():
    with pytest.raises(ValueError, match="tree's shape"):
        from_arrays([0, 0], [-1, 0], root=0).prune(torch.zeros(1, 2, dtype=torch.bool))
