"""What a batch of token trees says about itself, held to the slow model: shape, walks, acceptance."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_model import TOKENS, batches, models, read

from draftree.tree import TokenTree
from draftree.tree.structure import _Cache, on_cpu, on_device, structure_of


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
    for found in (tree.structure, on_cpu(tree.parents.numpy()), on_device(tree.parents)):
        assert found.depth.tolist() == depth
        assert (found.depth.dtype, found.ancestors.dtype) == (torch.long, torch.bool)
        assert torch.equal(found.ancestors, expected_ancestors(batch, width))
    assert tree.height == max(map(max, depth))
    assert tree.real.tolist() == [[i < len(m) for i in range(width)] for m in batch]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 63, 64, 300])
def test_chains_of_any_length(length):
    tree = TokenTree.from_arrays(range(length), range(-1, length - 1), root=0)
    assert tree.depth.tolist() == [list(range(length + 1))]
    assert torch.equal(tree.ancestors[0], torch.ones(length + 1, length + 1).tril().bool())
    assert torch.equal(on_device(tree.parents).ancestors, tree.ancestors)


def test_height_of_a_shape_born_on_a_device_is_read_when_asked():
    tree = TokenTree.from_arrays([1, 2, 3], [-1, 0, -1], root=0)
    born = TokenTree(tree.tokens, tree.parents, tree.logp, tree.source, tree.sizes, on_device(tree.parents))
    assert born.structure.height is None
    assert born.height == 2
    assert born.structure.height == 2


def test_equal_shapes_share_one_structure_and_unequal_ones_do_not():
    first = TokenTree.from_arrays([1, 2], [-1, 0], root=5)
    assert TokenTree.from_arrays([8, 9], [-1, 0], root=6).ancestors is first.ancestors
    assert TokenTree.from_arrays([1, 2], [-1, -1], root=5).ancestors is not first.ancestors
    # The same bytes cut into other rows.
    flat = torch.tensor([[-1, 0, -1, 0]])
    assert structure_of(flat).depth.tolist() == [[0, 1, 0, 1]]
    assert structure_of(flat.view(2, 2)).depth.tolist() == [[0, 1], [0, 1]]


def test_structure_cache_stays_within_its_bytes_and_forgets_the_least_used():
    def parents(length):
        return np.arange(-1, length - 1)[None]

    def key(length):
        return (parents(length).shape, parents(length).tobytes(), None)

    def cost(length):
        return 1024 + 8 * length + length * length + 8 * length

    cache = _Cache(8 * cost(20))
    for length in range(11, 21):
        cache.put(key(length), on_cpu(parents(length)))
        assert cache.get(key(11)) is not None, "asked for each time, so it must stay"
        assert cache.used == sum(cost_ for _, cost_ in cache.entries.values()) <= cache.capacity
    assert cache.get(key(12)) is None
    assert cache.get(key(20)) is not None
    held = cache.used
    cache.put(key(20), on_cpu(parents(20)))
    assert cache.used == held, "a second put of one key counts once"
    cache.put(key(200), on_cpu(parents(200)))
    assert cache.get(key(200)) is None, "one entry may not push out an eighth of the rest"


@given(batches(), st.data())
def test_longest_match_is_the_deepest_confirmed_node(batch, data):
    tree = stacked(batch)
    says = [data.draw(st.lists(TOKENS, min_size=tree.width, max_size=tree.width)) for _ in batch]
    found = tree.longest_match(torch.tensor(says)).tolist()
    for model, said, node in zip(batch, says, found, strict=True):
        assert node == max(
            (i for i in range(len(model)) if model.confirmed(i, said)), key=lambda i: (model.depth(i), -i)
        )


def test_padding_never_matches_a_live_token_zero():
    tree = TokenTree.stack([TokenTree.from_arrays([1, 0], [-1, 0], root=9), TokenTree.roots(torch.tensor([9]))])
    assert tree.longest_match(torch.zeros(2, 3, dtype=torch.long)).tolist() == [0, 0]
    assert tree.longest_match(torch.tensor([[1, 0, 0], [0, 0, 0]])).tolist() == [2, 0]


def test_longest_match_finds_the_right_one_of_equal_siblings():
    tree = TokenTree.from_arrays([7, 7, 3], [-1, -1, 1], root=1)
    assert tree.longest_match(torch.tensor([[7, 0, 3, 0]])).tolist() == [3]
    assert tree.longest_match(torch.tensor([[7, 3, 0, 0]])).tolist() == [1]


@given(batches(), st.data())
def test_path_nodes_lead_from_the_root(batch, data):
    tree = stacked(batch)
    nodes = [data.draw(st.integers(0, len(model) - 1)) for model in batch]
    found, lengths = tree.path_nodes(torch.tensor(nodes))
    assert found.shape == (len(batch), tree.height + 1)
    for model, node, row, length in zip(batch, nodes, found.tolist(), lengths.tolist(), strict=True):
        expected = model.above(node)
        assert length == len(expected)
        assert row == expected + [-1] * (len(row) - length)


@given(models(), st.data())
def test_runner_walks(model, data):
    tree = TokenTree.stack([TokenTree.roots(torch.tensor([2])), model.tree()])
    node = data.draw(st.integers(0, len(model) - 1))
    assert tuple(tree.path(1, node)) == model.path(node)
    assert tree.children(1, node) == model.children(node)
    truth = data.draw(st.lists(TOKENS, max_size=6))
    found = tree.walk(1, truth)
    matching = [i for i in range(len(model)) if model.matches(i, truth)]
    assert found == model.above(max(matching, key=lambda i: (model.depth(i), -i)))
    assert tree.walk(0, truth) == [0]


def test_a_node_outside_the_tree_has_no_path():
    tree = TokenTree.stack([TokenTree.roots(torch.tensor([2])), TokenTree.from_arrays([1], [-1], root=0)])
    for node in (1, -1):
        with pytest.raises(IndexError, match=r"0\.\.0"):
            tree.path(0, node)


@given(models())
def test_choices_rank_siblings_by_probability_then_index(model):
    listed = model.tree().choices(0)
    by_name = {(): 0} | {name: i for i, name in enumerate(listed, 1)}
    assert len(by_name) == len(model), "names are unique, even of equal siblings"
    for name, node in by_name.items():
        below = sorted(model.children(node), key=lambda i: (-model.logp[i], i))
        assert [by_name[(*name, rank)] for rank in range(len(below))] == below


@given(batches(), st.data())
def test_select_and_pad_change_nothing_else(batch, data):
    tree = stacked(batch)
    chosen = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=5))
    some = tree.select(chosen)
    assert [read(some, b) for b in range(some.batch)] == [read(tree, b) for b in chosen]
    assert some.width == max(len(batch[b]) for b in chosen)
    wide = some.pad(tree.width + 3)
    assert wide.width == tree.width + 3
    assert [read(wide, b) for b in range(wide.batch)] == [read(tree, b) for b in chosen]
    assert wide.depth[:, : some.width].tolist() == some.depth.tolist()
    assert wide.ancestors[:, -1].sum(-1).tolist() == [1] * wide.batch
    with pytest.raises(ValueError, match="larger width"):
        tree.pad(max(tree.sizes) - 1)


def test_to_its_own_device_is_the_same_tree():
    tree = TokenTree.from_arrays([1, 2], [-1, 0], root=5)
    assert tree.to("cpu") is tree


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@given(batches(), st.data())
def test_a_gpu_gives_the_answers_of_the_cpu(batch, data):
    runner = stacked(batch)
    gpu = runner.to("cuda")
    says = torch.tensor([data.draw(st.lists(TOKENS, min_size=runner.width, max_size=runner.width)) for _ in batch])
    keep = says > 0
    assert gpu.ancestors.is_cuda
    assert torch.equal(gpu.ancestors.cpu(), runner.ancestors)
    ours, theirs = runner.longest_match(says), gpu.longest_match(says.cuda())
    assert torch.equal(theirs.cpu(), ours)
    for a, b in zip(gpu.path_nodes(theirs), runner.path_nodes(ours), strict=True):
        assert torch.equal(a.cpu(), b)
    (g, g_index), (h, h_index) = gpu.prune(keep.cuda()), runner.prune(keep)
    assert torch.equal(g_index.cpu(), h_index)
    limits = list(range(len(batch)))
    pairs = [(g, h), (gpu.best(3), runner.best(3)), (gpu.best(limits), runner.best(limits))]
    pairs += [(gpu.merge(gpu.best(3)), runner.merge(runner.best(3)))]
    for a, b in pairs:
        assert a.device == gpu.device
        for i in range(b.batch):
            assert read(a.to("cpu"), i) == read(b, i)
        assert a.sizes == b.sizes
        assert a.height == b.height
        assert torch.equal(a.depth.cpu(), b.depth)
        assert torch.equal(a.ancestors.cpu(), b.ancestors)
