"""Steps between two plans: the size that is best on the average, and none where drafting does not pay."""

from __future__ import annotations

import numpy as np

from draftree.drafting import Context
from draftree.host.cost import StepCost
from draftree.shaping import DynamicTree
from draftree.shaping.cruise import BETWEEN, MOST, Cruise
from draftree.tree import TokenTree

CHEAP = np.linspace(1.0, 1.3, MOST + 1)
DEAR = np.arange(1.0, MOST + 2)


def test_the_size_is_best_on_the_average_of_plans() -> None:
    cruise = Cruise()
    good, poor = np.full(5, 0.9), np.full(1, 0.05)
    cruise.plan(1, good, CHEAP, 0.0)
    sizes = [cruise.due(1) for _ in range(BETWEEN + 1)]
    assert sizes == [5] * BETWEEN + [0]  # then the next plan is due
    cruise.plan(1, poor, CHEAP, 0.0)
    assert cruise.due(1) == 5  # one poor tree among good ones says little
    for _ in range(60):
        cruise.plan(1, poor, DEAR, 0.0)
    assert cruise.due(1) == 0
    cruise.plan(2, poor, CHEAP, 0.0)
    assert cruise.due(2) == 1  # requests have averages of their own
    cruise.plan(2, good, CHEAP, 100.0)
    assert cruise.due(2) == 0  # what drafting itself takes counts
    cruise.end(1)
    assert cruise.due(1) == 0


def test_only_every_fourth_step_is_planned_where_drafting_pays() -> None:
    request = Context(7, [1, 2, 3], 3, 1000)
    for steep, planned in ((False, 10), (True, 40)):
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
                trimmed = shape.trim([request], tree if budget >= 3 else tree.first(budget))
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
        steady += shape._steady > 0
        (budget,) = shape.budgets([request], 64)
        assert 0 < budget <= 4
        path = [5, 6, 7, 8][:budget]
        shape.trim([request], TokenTree.from_paths(request.tokens[-1], [path], [[-0.05] * budget]))
        request.tokens += [*path, 9]
        shape.learn([request])
        shape.clock(1 + budget, 1.0, 1.0)
    assert steady > 10
