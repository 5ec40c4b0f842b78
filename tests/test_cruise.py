"""Steps between two plans: the size that is best on the average, and none where drafting does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from draftree.drafting import Context
from draftree.host.cost import StepCost
from draftree.shaping import DynamicTree
from draftree.shaping.counts import AHEAD, Average, Sizes
from draftree.shaping.cruise import BETWEEN, LOOK_EVERY, Cruise, Pace
from draftree.tree import TokenTree

CHEAP, DEAR = np.linspace(1.0, 2.0, 100), np.arange(1.0, 101.0)


def pace(seconds: np.ndarray, aside: float = 0.0, batch: int = 1) -> Pace:
    return Pace(seconds, aside, float(seconds[batch - 1]))


def request_of(number: int) -> Context:
    return Context(number, [1, 2, 3], 3, 1000)


def full(cruise: Cruise, *requests: Context) -> None:
    """Their trees have always had all guesses."""
    for average in cruise.averages(requests, [True] * len(requests)):
        assert average is not None
        average.values[:] = 1.0


def test_steps_between_plans_are_of_the_sizes_found() -> None:
    cruise, one, two = Cruise(), request_of(1), request_of(2)
    full(cruise, one, two)
    cruise.follow([one], Sizes([5], [3.5]), [True], pace(CHEAP), packed=True)
    sizes = []
    for _ in range(BETWEEN + 1):
        sizes.append(cruise.due([one]))
        one.tokens += [7, 7, 7]
    assert sizes == [[5]] * BETWEEN + [None]  # then the next plan is due
    (course,) = cruise.over([one])
    assert course.gain == pytest.approx(3 * (BETWEEN + 1) / BETWEEN)
    assert course.spent == pytest.approx(CHEAP[5])
    assert cruise.over([one]) == []  # told once
    for seconds, aside in ((DEAR, 0.0), (CHEAP, 100.0)):  # what drafting itself takes counts
        cruise.follow([one], Sizes([5], [3.5]), [True], pace(seconds, aside), packed=True)
        assert cruise.due([one]) is None
    cruise.follow([one, two], Sizes([4, 2], [3.5, 1.5]), [True, False], pace(CHEAP, batch=2), packed=True)
    assert cruise.due([one, two]) == [4, 0]  # nothing for a request that drafting does not pay for
    assert cruise.due([one]) is None  # another batch is planned for anew
    cruise.follow([one, two], Sizes([4, 2], [3.5, 1.5]), [True, True], pace(CHEAP, batch=2), packed=True)
    cruise.end(2)
    assert cruise.due([one, two]) is None


def test_steps_that_do_not_pay_are_given_up_soon() -> None:
    """They bring a token each and take 1.05 of a plain step: a little patience, and a plan when it is at an end."""
    for came, steps in ((1, LOOK_EVERY), (2, BETWEEN)):
        cruise, one = Cruise(), request_of(1)
        full(cruise, one)
        cruise.follow([one], Sizes([5], [3.5]), [True], pace(1 + 0.05 * DEAR), packed=True)
        taken = 0
        while cruise.due([one]) is not None:
            one.tokens += [7] * came
            taken += 1
        assert taken == steps
        assert [course.gain for course in cruise.over([one])] == [came]


def test_padding_costs_where_rows_are_not_packed() -> None:
    one, two = request_of(1), request_of(2)
    for packed in (True, False):
        cruise = Cruise()
        full(cruise, one, two)
        cruise.follow(
            [one, two], Sizes([10, 0], [3.0, 1.0]), [True, True], pace(1 + 0.1 * DEAR, batch=2), packed=packed
        )
        assert (cruise.due([one, two]) is not None) == packed


def test_guesses_that_are_seldom_there_cost_little() -> None:
    """A tree of five that is there in one step of five adds a row to the average step, not five."""
    for there in (1.0, 0.2):
        cruise, one = Cruise(), request_of(1)
        (average,) = cruise.averages([one], [True])
        assert average is not None
        average.values[:] = np.stack([np.full(AHEAD, 0.1), np.full(AHEAD, there)])
        cruise.follow([one], Sizes([5], [1.45]), [True], pace(1 + 0.1 * DEAR), packed=True)
        assert (cruise.due([one]) is not None) == (there < 1)


def test_averages_are_the_requests_own() -> None:
    cruise = Cruise()
    first, none = cruise.averages([request_of(1), request_of(2)], [True, False])
    assert none is None
    assert first is not None
    assert first.values.tolist() == [[0.0] * AHEAD] * 2
    assert cruise.averages([request_of(1)], [True]) == [first]
    cruise.end(1)
    assert cruise.averages([request_of(1)], [True]) != [first]


def test_an_average_learns_from_trees() -> None:
    average = Average(0.6)
    for worth in ([0.8, 0.4], [0.6], [0.1, 0.1, 0.1]):
        average.add(np.array(worth))
    after_two = np.array([0.7, 0.2, 0.0])
    np.testing.assert_allclose(average.values[0, :3], 0.6 * after_two + 0.04)
    np.testing.assert_allclose(average.values[1, :4], [1.0, 0.7, 0.4, 0.0])
    assert average.rows(2) == pytest.approx(1.7)
    fresh = Average(0.6, average)
    np.testing.assert_allclose(fresh.values, average.values)
    assert fresh.past == 0.5  # the others count as much as a tree
    assert Average(0.6, Average(0.6)).past == 0.0  # if anything is known of them


def test_most_steps_are_not_planned_where_drafting_pays() -> None:
    request = Context(7, [1, 2, 3], 3, 1000)
    for steep, planned in ((False, 2), (True, 40)):
        shape = DynamicTree(cost=StepCost((1, 64), (1.0, 64.0 if steep else 1.001)))
        shape.bind(StepCost((1, 2), (1.0, 2.0)))
        weighed = 0
        for _ in range(40):
            tree = TokenTree.from_paths(request.tokens[-1], [[5, 6, 7]], [[-0.05] * 3])
            if shape.rests([request]):
                continue
            (budget,) = shape.budgets([request], 64)
            if budget:
                before = shape.calibration._offered
                trimmed = shape.trim([request], tree if budget >= 3 else tree.first([budget]))
                weighed += shape.calibration._offered - before
                assert steep or trimmed.sizes == (4,)
            request.tokens += [5, 6, 7, 8] if not steep else [9]
            shape.learn([request])
            shape.clock(4, 1.0, 1.0)
        assert weighed <= planned
        assert steep or weighed >= planned
        shape.end(request)


def test_no_step_asks_for_more_than_was_allowed() -> None:
    request = Context(7, [1, 2, 3], 3, 1000)
    shape = DynamicTree(max_nodes=4, cost=StepCost((1, 64), (1.0, 1.001)))
    shape.bind(StepCost((1, 2), (1.0, 2.0)))
    steady = 0
    for _ in range(20):
        assert not shape.rests([request])
        steady += shape._steady is not None
        (budget,) = shape.budgets([request], 64)
        assert 0 < budget <= 4
        path = [5, 6, 7, 8][:budget]
        shape.trim([request], TokenTree.from_paths(request.tokens[-1], [path], [[-0.05] * budget]))
        request.tokens += [*path, 9]
        shape.learn([request])
        shape.clock(1 + budget, 1.0, 1.0)
    assert steady > 10
