"""Static trees: their nodes, the best tree against brute force, and a drafter that verifies exactly them."""

from __future__ import annotations

import itertools

import pytest
import torch
from generate_driver import NEW, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from in_model_driver import randomised
from tree_paths import path_of
from zoo import build

from draftree.drafting import BiTA, Medusa, RequestState
from draftree.drafting.in_model import Candidates
from draftree.engine import generate
from draftree.shaping import Fixed, shape_for
from draftree.tree.static import best_choices, chain, choices_named, efficient, full


def test_named_trees() -> None:
    assert chain(3) == [(0,), (0, 0), (0, 0, 0)]
    assert full(2, 2) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(full(5, 3)) == 5 + 25 + 125
    paper, code = efficient(3, 3), efficient(3, 3, fewer=True)
    assert paper == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert code == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]
    assert len(efficient(2, 4, fewer=True)) == 2 + 1 + 1 + 1  # one child is the least that goes on


def test_trees_by_name() -> None:
    assert choices_named("chain", 2) == chain(2)
    assert choices_named("full-4", 2) == full(4, 2)
    assert choices_named("efficient-5", 3) == efficient(5, 3)
    assert choices_named("efficient-code-5", 3) == efficient(5, 3, fewer=True)
    assert choices_named([[0, 1], (0,), (2,), (2,)], 2) == [(0,), (2,), (0, 1)]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ("full", "full-K"),
        ("full-0", "full-K"),
        ("wide-3", "best-first"),
        ([], "empty"),
        ([(0,), ()], "no choice"),
        ([(-1,)], "no choice"),
        ([(0, 0)], "prefix"),
        ([(0,), (0, 0), (0, 0, 0)], "2 deep"),
    ],
    ids=str,
)
def test_trees_that_are_none(tree: str | list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choices_named(tree, 2)


share = st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.6])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(share, min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 5))
def test_the_best_tree_is_the_best_of_all(accuracies: list[list[float]], node_budget: int) -> None:
    """Against brute force over all sets of nodes that hold their prefixes."""

    def worth(node: tuple[int, ...]) -> float:
        product = 1.0
        for d, rank in enumerate(node):
            product *= accuracies[d][rank]
        return product

    nodes = [
        node
        for d in range(1, len(accuracies) + 1)
        for node in itertools.product(*(range(len(ranks)) for ranks in accuracies[:d]))
    ]
    # The best sets hold the nodes of largest worth, and a prefix is never worth less.
    expected = sum(sorted(map(worth, nodes), reverse=True)[:node_budget])
    chosen = best_choices(accuracies, node_budget)
    assert sum(map(worth, chosen)) == pytest.approx(expected)
    assert len(set(chosen)) == len(chosen) <= node_budget
    if chosen:
        assert choices_named(chosen, len(accuracies)) == chosen
    assert all(worth(node) > 0 for node in chosen)


@pytest.mark.parametrize(("accuracies", "node_budget"), [([[0.5]], 0), ([[1.5]], 3)])
def test_best_tree_of_nonsense(accuracies: list[list[float]], node_budget: int) -> None:
    with pytest.raises(ValueError, match=r"node_budget|accuracies"):
        best_choices(accuracies, node_budget)


@pytest.mark.parametrize("tree", ["chain", "full-2", "efficient-5", "efficient-code-5", [[0], [3], [3, 1]]], ids=str)
def test_a_draft_is_the_named_tree(tree: str | list[list[int]]) -> None:
    """Filled with the candidates of each depth, whole, and less deep where no room is left."""
    drafter = BiTA.fresh(build("llama"), tree=tree)
    tokens = torch.arange(100, 100 + 3 * drafter.candidates).view(3, -1)
    logp = torch.full(tokens.shape, 1 / drafter.candidates).log()
    drafter._held[7] = Candidates(3, tokens.numpy(), logp.numpy())
    for room in (50, 3, 2, 1):
        drafted = drafter.draft([RequestState(7, [4, 5, 6], 2, room)], [drafter.max_nodes])
        depth = min(room - 1, 3)
        expected = [c for c in choices_named(tree, 3) if len(c) <= depth]
        paths = [tuple(tokens[d, rank].item() for d, rank in enumerate(c)) for c in expected]
        assert [tuple(path_of(drafted, 0, n)[1:]) for n in range(1, drafted.sizes[0])] == paths
        assert int(drafted.tokens[0, 0]) == 6
    assert drafter.draft([RequestState(7, [4, 5, 6, 6], 2, 9)], [99]).sizes == (1,)  # the text has gone on: stale


def test_a_static_tree_is_verified_whole() -> None:
    """Without a shape of the user's, the shape is the tree itself; a budget below it cuts the least likely."""
    model = build("llama")
    ids = torch.tensor(prompts((9,)))
    drafter = randomised(Medusa.fresh(model, heads=3, tree="efficient-4"))
    shape = shape_for(drafter)
    assert isinstance(shape, Fixed)
    assert shape.node_budget == drafter.node_budget == 12
    out = generate(model, ids, drafter=drafter, max_new_tokens=NEW)
    steps = out.stats.total.steps
    assert 12 * (steps - 4) <= out.stats.total.drafted <= 12 * (steps - 1)
    cut = generate(model, ids, drafter=drafter, shape=Fixed(5), max_new_tokens=NEW)
    assert cut.stats.total.drafted <= 5 * (cut.stats.total.steps - 1)
    assert torch.equal(cut.sequences, out.sequences)
