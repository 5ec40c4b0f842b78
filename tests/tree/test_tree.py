"""Shapes and paths of a batch of token trees, against the slow model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_model import batches, models
from tree_paths import children_of, from_arrays, path_of

from draftree.tree import TokenTree
from draftree.tree.structure import on_cpu


def stacked(batch):
    return TokenTree.stack([model.tree() for model in batch])


def expected_ancestors(batch, width):
    seen = torch.eye(width, dtype=torch.bool).repeat(len(batch), 1, 1)
    for b, model in enumerate(batch):
        for i in range(len(model)):
            seen[b, i, model.above(i)] = True
    return seen


@given(batches())
def test_structure_is_the_models(batch):
    tree = stacked(batch)
    width = max(map(len, batch))
    assert (tree.batch, tree.width, tree.sizes) == (len(batch), width, tuple(map(len, batch)))
    depth = [[m.depth(i) for i in range(len(m))] + [0] * (width - len(m)) for m in batch]
    for found in (tree.structure, on_cpu(tree.parents.numpy())):
        assert found.depth.tolist() == depth
        assert (found.depth.dtype, found.ancestors.dtype) == (torch.long, torch.bool)
        assert torch.equal(found.ancestors, expected_ancestors(batch, width))
    assert tree.height == max(map(max, depth))
    assert tree.real.tolist() == [[i < len(m) for i in range(width)] for m in batch]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 63, 64, 300])
def test_chains_of_any_length(length):
    tree = from_arrays(range(length), range(-1, length - 1), root=0)
    assert tree.depth.tolist() == [list(range(length + 1))]
    assert torch.equal(tree.ancestors[0], torch.ones(length + 1, length + 1).tril().bool())


@given(models(), st.data())
def test_paths_and_children_of_one_tree(model, data):
    tree = TokenTree.stack([TokenTree.roots(torch.tensor([2])), model.tree()])
    node = data.draw(st.integers(0, len(model) - 1))
    assert tuple(path_of(tree, 1, node)) == model.path(node)
    assert children_of(tree, 1, node) == model.children(node)
