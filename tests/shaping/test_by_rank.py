"""ProPD's acceptance model: shares by depth and rank are found, and the product that the paper takes is told apart."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
import torch
from tree_paths import children_of, from_arrays, path_of

from draftree.drafting import RequestState
from draftree.shaping.by_rank import DEPTHS, RANKS, ByRank
from draftree.tree import TokenTree

ON = ([0.6, 0.2, 0.1], [0.7, 0.1, 0.05])  # shares of the ranks of two depths, below the best path
OFF = [0.15, 0.1, 0.05]  # of the second depth below another node


def context(number: int, tokens: list[int]) -> RequestState:
    return RequestState(number, tokens, 1, 1000)


def full_tree() -> TokenTree:
    """Three candidates of two depths in all combinations; tokens 10 + rank and 20 + rank."""
    candidates = torch.tensor([[[10, 11, 12], [20, 21, 22]]])
    logp = torch.tensor([[[0.5, 0.3, 0.1], [0.5, 0.3, 0.1]]]).log()
    choices = [node for d in (1, 2) for node in itertools.product(range(3), repeat=d)]
    return TokenTree.from_choices(torch.tensor([9]), candidates, choices, logp)


def rank_of(rng: random.Random, shares: list[float]) -> int:
    """Which rank is the truth, or one that there is not."""
    return rng.choices([0, 1, 2, 3], [*shares, 1 - sum(shares)])[0]


def taught(model: ByRank, steps: int = 4000, seed: int = 0) -> tuple[ByRank, float]:
    """The model after many steps of synthetic text, and the draft tokens accepted per step in the second half."""
    rng, tree, came, model.alpha = random.Random(seed), full_tree(), 0, 0.002
    for step in range(steps):
        first = rank_of(rng, ON[0])
        second = rank_of(rng, ON[1] if first == 0 else OFF)
        request = context(step, [9])
        model.remember([request], tree)
        request.tokens += [10 + first, 20 + second, 5]
        model.compare([request])
        model.forget(request)
        if step >= steps // 2 and first < 3:
            came += 1 + (second < 3)
    return model, came / (steps - steps // 2)


def test_known_shares_are_recovered() -> None:
    model, came = taught(ByRank())
    within = model.shares.cumsum(2)
    assert within[0, 0, :3] == pytest.approx(np.cumsum(ON[0]), abs=0.04)
    assert within[0, 1, :3] == pytest.approx(np.cumsum(ON[1]), abs=0.04)
    assert within[1, 1, :3] == pytest.approx(np.cumsum(OFF), abs=0.04)
    assert model.worth(full_tree()).sum() == pytest.approx(came, rel=0.03)


def test_the_papers_product_overrates_what_lies_below_a_second_choice() -> None:
    tree = full_tree()
    model, _ = taught(ByRank())
    product, _ = taught(ByRank(conditional=False))
    place = {tuple(path_of(tree, 0, n)[1:]): n for n in range(1, tree.width)}
    ours, theirs = model.worth(tree)[0], product.worth(tree)[0]
    below_second = place[11, 20]
    assert ours[below_second] == pytest.approx(ON[0][1] * OFF[0], abs=0.02)
    # Each depth by itself: how often its best candidate was the truth, whatever stood before it.
    alone = ON[0][0] * ON[1][0] + (1 - ON[0][0]) * OFF[0]
    assert theirs[below_second] == pytest.approx(ON[0][1] * alone, abs=0.02)
    assert theirs[below_second] > 2.5 * ours[below_second]
    assert theirs[place[10, 20]] < ours[place[10, 20]]  # and underrates the best path


@pytest.mark.parametrize("conditional", [True, False])
def test_figure_6_of_the_paper(conditional: bool) -> None:
    """Heads [.6, .1] and [.3, .1]; the tree of 'abd' and 'ac' has an expected acceptance length of 1.88."""
    model = ByRank(conditional=conditional)
    model.shares[0, :2, :2] = [[0.6, 0.1], [0.3, 0.1]]
    a, b, c, d, e = range(5)
    tree = TokenTree.from_paths(a, [[b, d], [c]], [[-0.1, -0.2], [-1.0]])
    assert 1 + model.worth(tree).sum() == pytest.approx(1.88)
    whole = TokenTree.from_paths(a, [[b, d], [b, e], [c]], [[-0.1, -0.2], [-0.1, -0.9], [-1.0]])
    place = {tuple(path_of(whole, 0, n)[1:]): n for n in range(1, whole.width)}
    worth = model.worth(whole)[0]
    assert worth[place[b,]] == pytest.approx(0.6)
    assert worth[place[b, e]] == pytest.approx(0.06)


def slow_places(tree: TokenTree, b: int) -> list[tuple[int, int, bool]]:
    """Depth, rank and whether the parent lies on the best path, node by node."""
    found: list[tuple[int, int, bool]] = []
    for node in range(1, tree.sizes[b]):
        chain = [node]
        while chain[-1] > 0:
            chain.append(int(tree.parents[b, chain[-1]]))
        ranks = []
        for child, parent in itertools.pairwise(chain):
            siblings = sorted(children_of(tree, b, parent), key=lambda n: (-float(tree.logp[b, n]), n))
            ranks.append(siblings.index(child))
        found.append((len(ranks), ranks[0], not any(ranks[1:])))
    return found


def random_tree(rng: random.Random, size: int) -> TokenTree:
    parents = [rng.randrange(max(-1, i - 4), i) for i in range(size)]
    logp: list[float] = []
    for parent in parents:
        logp.append((logp[parent] if parent >= 0 else 0.0) - rng.choice([0.1, 0.5, 0.5, 2.0]))
    return from_arrays([rng.randrange(3) for _ in parents], parents, logp, root=9)


def test_places_in_any_batch() -> None:
    """Against a walk node by node: ragged trees, deeper and wider than the places told apart, ties among siblings."""
    rng = random.Random(4)
    model = ByRank()
    shares = model.shares
    for _ in range(40):
        trees = TokenTree.stack([random_tree(rng, rng.choice([0, 1, 6, 40])) for _ in range(rng.randrange(1, 5))])
        worth = model.worth(trees)
        for b in range(trees.batch):
            assert worth[b, 0] == 0
            assert (worth[b, trees.sizes[b] :] == 0).all()
            for node, (depth, rank, best) in enumerate(slow_places(trees, b), 1):
                parent = int(trees.parents[b, node])
                share = shares[0 if best else 1, min(depth, DEPTHS) - 1, min(rank, RANKS - 1)]
                assert worth[b, node] == pytest.approx((worth[b, parent] if parent else 1.0) * max(share, 1e-4))


def test_trees_are_cut_by_these_probabilities() -> None:
    model = ByRank()
    model.shares[0, :2, :2] = [[0.2, 0.1], [0.9, 0.0]]
    tree = TokenTree.from_paths(9, [[1, 2], [3]], [[-0.1, -5.0], [-0.2]])
    assert sorted(tree.best(2).tokens[0].tolist()) == [1, 3, 9]
    weighed = model.weighed(tree)
    assert weighed.logp[0].exp().tolist() == pytest.approx([1.0, 0.2, 0.18, 0.1])
    assert sorted(weighed.best(2).tokens[0].tolist()) == [1, 2, 9]
    ragged = model.weighed(TokenTree.stack([tree, TokenTree.roots(torch.tensor([9]))]))
    assert ragged.logp[1].tolist() == [0.0, *[-torch.inf] * 3]


@pytest.mark.parametrize("conditional", [True, False])
def test_it_waits_for_text_and_forgets(conditional: bool) -> None:
    model, tree = ByRank(conditional=conditional), full_tree()
    before = model.shares.copy()
    request = context(1, [9])
    model.remember([request], tree)
    model.compare([request])
    request.tokens.append(10)
    model.compare([request])  # its children may still hold
    assert (model.shares == before).all()
    request.tokens.append(21)
    model.compare([request])
    learned = model.shares.copy()
    assert (learned != before).any()
    model.remember([request], tree)
    model.forget(request)
    request.tokens += [10, 20]
    model.compare([request])
    assert (model.shares == learned).all()
    model.remember([request], TokenTree.roots(torch.tensor([20])))  # no draft token, nothing to learn
    assert not model._drafted


def test_a_rank_that_was_not_offered_is_no_miss() -> None:
    """Small trees say nothing of what they left out."""
    model = ByRank()
    model.alpha, before = 0.1, model.shares[0, 0].copy()
    chain = TokenTree.from_paths(9, [[10]], [[-0.5]])
    for step in range(50):
        request = context(step, [9])
        model.remember([request], chain)
        request.tokens += [11, 5]
        model.compare([request])
    after = model.shares[0, 0]
    assert after[0] < 0.05
    assert after[1:] == pytest.approx(before[1:])


def test_a_tree_of_64_nodes_costs_microseconds() -> None:
    rng = random.Random(1)
    trees = [random_tree(rng, 64) for _ in range(50)]
    model = ByRank()
    spent = []
    for _ in range(20):
        begin = time.thread_time()
        for tree in trees:
            model.worth(tree)
        spent.append((time.thread_time() - begin) / len(trees))
    print(f"{1e6 * min(spent):.0f} us")
    assert min(spent) < 300e-6
