"""The ledger finds how often draft tokens of each kind are accepted; calibration does so for whole drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_paths import from_arrays

from draftree.drafting import RequestState
from draftree.drafting.acceptance_statistics import BINS, CLASSES, HEAVY, WIDTH, AcceptanceStatistics, cells_of
from draftree.drafting.merge.votes import Calibration
from draftree.tree import TokenTree


def context(number: int, tokens: list[int]) -> RequestState:
    return RequestState(number, tokens, 2, 1000)


def test_cells_tell_rank_and_confidence() -> None:
    cells = cells_of([-0.01, -0.01, -0.01, -0.01, -0.01, -0.01, -0.01])
    assert [cell % CLASSES for cell in cells] == [0, 1, 1, 2, 2, 2, 3]
    assert [cell // CLASSES for cell in cells_of([-0.1, -0.4, -2.0, -50.0])] == [0, 1, int(2.0 / WIDTH), BINS - 1]
    assert cells_of([-np.inf]) == [CLASSES * (BINS - 1)]
    assert cells_of([]) == []


@given(st.lists(st.floats(-8, 0), max_size=12))
def test_ranks_do_not_depend_on_the_order_of_nodes(logp: list[float]) -> None:
    """Whatever the order in a tree, a draft token has the cell that it has among the sorted ones; of equals any."""
    order = sorted(range(len(logp)), key=logp.__getitem__, reverse=True)
    assert sorted(cells_of(logp)) == sorted(cells_of([logp[i] for i in order]))
    found = cells_of(logp)
    assert [found[i] for i in order] == cells_of([logp[i] for i in order])


@pytest.mark.parametrize(("claimed", "rate"), [(-0.05, 0.4), (-0.05, 0.9), (-0.7, 0.1), (-4.0, 0.3)])
def test_shares_are_found_whatever_the_drafter_claims(claimed: float, rate: float) -> None:
    rng = np.random.default_rng(1)
    everyone, cells = AcceptanceStatistics(), cells_of([claimed])
    for _ in range(600):
        everyone.add(cells, [0] if rng.random() < rate else [])
    assert everyone.chances()[cells[0]] == pytest.approx(rate, abs=0.1)


def test_a_fresh_ledger_believes_the_drafter_and_an_own_one_all_others() -> None:
    everyone, own, cells = AcceptanceStatistics(), AcceptanceStatistics(0.97), cells_of([-0.5])
    (cell,) = cells
    assert everyone.chances()[cell] == pytest.approx(np.exp(-0.35 * 1.5))
    for _ in range(300):
        everyone.add(cells, [])
    assert everyone.chances(own)[cell] == pytest.approx(everyone.chances()[cell])
    for _ in range(20):
        own.add(cells, [0])
    assert everyone.chances()[cell] < 0.1
    assert everyone.chances(own)[cell] > 0.5


def test_counts_fade() -> None:
    """A drafter that has become worse is found out, and cells that are no longer verified come back to its claims."""
    ledger, cells = AcceptanceStatistics(0.9), cells_of([-0.1])
    for _ in range(50):
        ledger.add(cells, [0])
    good = ledger.chances()[cells[0]]
    for _ in range(50):
        ledger.add(cells, [])
    bad = ledger.chances()[cells[0]]
    for _ in range(100):
        ledger.add(cells_of([-5.0]), [])
    assert good > 0.85
    assert bad < 0.3
    assert ledger.chances()[cells[0]] == pytest.approx(np.exp(-WIDTH / 2), abs=0.01)


def test_weights_stay_finite() -> None:
    """Counts are scaled down together, which changes no share."""
    ledger, twin, cells = AcceptanceStatistics(0.5), AcceptanceStatistics(0.5), cells_of([-0.1, -0.9])
    for step in range(1000):  # 0.5 ** -1000 is near the largest number
        ledger.add(cells, [0] if step % 3 else [])
    assert ledger._weight <= 2 * HEAVY
    for step in range(900, 1000):
        twin.add(cells, [0] if step % 3 else [])
    assert ledger.chances() == pytest.approx(twin.chances())


# ------------------------------------------------------------------------------- whole drafts against the text


def test_calibration_judges_whole_paths() -> None:
    """A draft token is right only where all above it are; id 0 is a token like any other; depth waits for its text."""
    calibration = Calibration()
    trees = TokenTree.stack(
        [
            TokenTree.from_paths(5, [[6, 7, 8], [9, 7]], [[-0.1, -0.6, -0.6], [-2.0, -0.1]]),
            TokenTree.from_paths(5, [[0]], [[-0.1]]),
        ]
    )
    requests = [context(0, [1, 5]), context(1, [1, 5])]
    calibration.remember(requests, trees)
    before = calibration.worth(trees, requests)
    requests[0].tokens += [6, 7]
    calibration.compare(requests)
    assert (calibration.worth(trees, requests) == before).all()  # the third draft token's text has not come
    requests[0].tokens += [9]
    calibration.compare(requests)
    after = calibration.worth(trees, requests)[0]
    rose = {int(trees.tokens[0, i]): after[i] > before[0, i] for i in (1, 2)}
    assert rose == {6: True, 7: True}
    assert after[3] < before[0, 3]
    calibration.forget(requests[0])
    requests[1].tokens += [0]
    own = calibration.worth(trees, requests)[1, 1]
    calibration.compare(requests)
    assert calibration.worth(trees, requests)[1, 1] > own
    calibration.forget(requests[1])
    assert not calibration._waiting
    assert not calibration._own


def test_drafts_that_were_right_to_the_end_are_learned_from() -> None:
    """As far as the text went; a draft that nothing came behind teaches nothing."""
    calibration, request = Calibration(), context(0, [1, 5])
    tree = TokenTree.from_paths(5, [[6, 7, 8]], [[-1.0, -1.0, -1.0]])
    before = calibration.worth(tree, [request])[0, 1]
    calibration.remember([request], tree)
    request.tokens += [6]
    calibration.compare([request])
    assert calibration.worth(tree, [request])[0, 1] == before
    calibration.remember([request], tree)
    calibration.forget(request)
    assert calibration.worth(tree, [request])[0, 1] > before
    alone, untouched = context(1, [1, 5]), Calibration()
    untouched.remember([alone], tree)
    untouched.forget(alone)
    assert untouched.worth(tree, [alone])[0, 1] == before


def test_of_siblings_that_share_a_token_each_is_right() -> None:
    """A trie may keep branches apart; the text may go on along the second one."""
    calibration, request = Calibration(), context(0, [1, 5])
    tree = from_arrays([6, 6, 7], [-1, -1, 1], [-1.0, -2.0, -3.0], root=5)
    before = calibration.worth(tree, [request])[0]
    calibration.remember([request], tree)
    request.tokens += [6, 7]
    calibration.compare([request])
    assert (calibration.worth(tree, [request])[0, 1:] > before[1:]).all()
