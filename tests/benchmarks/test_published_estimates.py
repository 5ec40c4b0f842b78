"""ProPD's published estimates: shares by depth and rank, and the line through the times of steps."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from tree_paths import path_of

from benchmarks.shapes.by_rank import ByRank
from benchmarks.shapes.cost_line import CostLine
from draftree.drafting import RequestState
from draftree.runner.step_cost import StepCost
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


# ---------------------------------------------------------------- times


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_form_is_the_weighted_fit(seed: int) -> None:
    rng = random.Random(seed)
    line = CostLine(alpha=0.3, fading=0.05)
    averages: dict[int, float] = {}
    last: dict[int, int] = {}
    for step in range(1, 60):
        rows = rng.choice([1, 4, 9, 16, 33])
        seconds = (2.0 + 0.1 * rows) * rng.uniform(0.9, 1.1)
        before = averages.get(rows, float(line.of(rows)) if len(averages) > 1 else seconds)
        line.observe(rows, seconds)
        averages[rows] = 0.7 * before + 0.3 * seconds
        last[rows] = step
        if len(averages) < 2:
            continue
        weights = [math.exp(-0.05 * (step - last[n])) for n in averages]
        # numpy weighs residuals, not their squares
        b1, b0 = np.polyfit(list(averages), list(averages.values()), 1, w=np.sqrt(weights))
        if b1 > 0:
            assert line.line == pytest.approx((b0, b1), rel=1e-6)
            assert line.of([2, 50]) == pytest.approx(b0 + b1 * np.array([2, 50]))
    assert line.rows.tolist() == sorted(averages)
    assert line.seconds == pytest.approx(line.of(line.rows))


def test_it_follows_a_change_of_speed() -> None:
    """32 steps after all steps have become twice as slow, the line is within 5 % of them at the sizes in use."""
    line = CostLine()
    sizes = (8, 16)
    for step in range(100):
        line.observe(sizes[step % 2], 1.0 + 0.05 * sizes[step % 2])
    assert line.of(12) == pytest.approx(1.6)
    for step in range(32):
        line.observe(sizes[step % 2], 2 * (1.0 + 0.05 * sizes[step % 2]))
    assert line.of(12) == pytest.approx(3.2, rel=0.05)
    assert line.of(1) == pytest.approx(2.1, rel=0.1)


def test_seeded_or_from_nothing() -> None:
    curve = StepCost((1, 8, 64), (1.0, 1.7, 7.3))  # on a line
    line = CostLine(curve)
    assert line.of([1, 8, 64, 100]) == pytest.approx(curve.of([1, 8, 64, 100]))
    assert line.table[3:6] == pytest.approx(curve.of([3, 4, 5]))
    line.observe(8, 3.0)
    assert line.table[8] > 1.75  # the table does not stay behind
    nothing = CostLine()
    assert nothing.table[1:4].tolist() == [1.0, 1.0, 1.0]
    nothing.observe(4, 0.02)
    assert nothing.of([1, 64]).tolist() == [0.02, 0.02]
    nothing.observe(8, 0.03)
    assert nothing.of([4, 8, 12]) == pytest.approx([0.02, 0.03, 0.04])


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": 1.5}, {"fading": -0.1}, {"fading": math.nan}])
def test_what_is_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        CostLine(**options)
