"""Shapes at work: on a machine and a text made up for the test, and in an engine."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import prompts
from made_up_world import Chain, World
from zoo import build

from draftree.drafting import Drafter, Lookahead, RequestState
from draftree.engine import Engine, SamplingParams, generate
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed, shape_for
from draftree.shaping.base import Outcome

FLAT = StepCost((1, 64), (1.0, 1.001))
STEEP = StepCost((1, 2, 64), (1.0, 2.0, 64.0))  # a row costs what a token brings: nothing can pay


def kernel(rows: int) -> float:
    """Rows are free up to seven, and the eighth takes half a step: a matrix kernel ends there."""
    return 1.0 + 0.01 * rows if rows < 8 else 1.5 + 0.05 * (rows - 8)


def best_static(holds: float, seconds: Callable[[int], float], drafting: float = 0.0, most: int = 8) -> float:
    """Tokens a second of the best static size, or of plain decoding, as they are to be expected."""
    tokens = np.cumsum(holds ** np.arange(most + 1))
    return float(max(tokens[n] / (seconds(1 + n) + drafting * (n > 0)) for n in range(most + 1)))


# ------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("holds", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("seconds", [kernel, lambda rows: 1 + 0.002 * rows, lambda rows: 0.5 + 0.5 * rows])
@pytest.mark.parametrize("claims", [None, 0.9])
def test_it_is_as_fast_as_the_best_static_size(
    holds: float, seconds: Callable[[int], float], claims: float | None
) -> None:
    """From the first step on, although the curve that it begins with is rough and the drafter boasts."""

    world = World(Chain(lambda request: holds, claims), DynamicTree(), seconds, 0.02)
    speeds = [world.run([i], 150) for i in range(12)]
    assert np.mean(speeds) > 0.92 * best_static(holds, seconds, 0.02)
    assert np.mean(speeds[4:]) > 0.94 * best_static(holds, seconds, 0.02)


def test_a_cost_of_the_user_is_taken_as_it_is() -> None:
    """Whatever the steps take."""
    world = World(Chain(lambda request: 0.9), DynamicTree(cost=STEEP), lambda rows: 1.0)
    world.run([0], 50)
    assert sum(map(sum, world.sizes)) == 0
    world = World(Chain(lambda request: 0.9), DynamicTree(cost=FLAT), lambda rows: rows)
    world.run([0], 50)
    assert np.mean(world.sizes[10:]) == 8


def test_no_more_than_max_nodes() -> None:
    world = World(Chain(lambda request: 0.99), DynamicTree(max_nodes=3, cost=FLAT), lambda rows: 1.0)
    world.run([0], 30)
    assert max(map(max, world.sizes)) == 3


def test_the_likelier_request_of_a_batch_gets_more() -> None:
    world = World(Chain(lambda request: 0.9 if request else 0.1, most=6), DynamicTree(), kernel)
    world.run([0, 1], 120)
    poor, rich = np.mean(world.sizes[40:], axis=0)
    assert rich > poor + 2


# ------------------------------------------------------------------------------- no trees where they do not pay


@pytest.mark.parametrize(("attaches", "drafting"), [(0, 0.3), (2, 0.0), (0, 0.02)])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_drafter_that_knows_nothing_costs_little(attaches: int, drafting: float, batch: int) -> None:
    """Its work, or its rows, where nothing is ever accepted: near the speed of plain decoding."""

    def seconds(rows: int) -> float:
        return 1.0 + 0.1 * rows

    world = World(Chain(lambda request: 0.0, claims=0.5, attaches=attaches), DynamicTree(), seconds, drafting)
    speeds = [world.run(range(batch * i, batch * (i + 1)), 100) for i in range(6)]
    plain = batch / seconds(batch)
    assert np.mean(speeds[1:]) > 0.96 * plain
    assert np.mean(speeds) > 0.93 * plain


def test_rows_that_bring_no_draft_tokens_are_charged() -> None:
    """Rows, as of lookahead windows, whose rows cost the same where they bring no draft tokens at all."""

    def seconds(rows: int) -> float:
        return 1.0 + 0.1 * rows

    world = World(Chain(lambda request: 0.5, most=0, attaches=4), DynamicTree(), seconds)
    speeds = [world.run([i], 100) for i in range(6)]
    assert np.mean(speeds) > 0.93 / seconds(1)


def test_a_slow_moment_in_the_beginning_does_not_stay_true() -> None:
    """Steps without attached rows were measured in it: thought so slow, drafting would seem to pay for ever."""
    slow = 2.0

    def seconds(rows: int) -> float:
        return slow * (1.0 + 0.15 * rows)

    world = World(Chain(lambda _: 0.2, attaches=3), DynamicTree(), seconds)
    world.run([0], 4)
    slow = 1.0
    world.run([0], 200)
    late = world.run([0], 300)
    assert late > 0.95 / seconds(1)


def test_a_drafter_that_gets_better_is_noticed() -> None:
    quality = [0.0]
    drafter = Chain(lambda request: quality[0], claims=0.5)
    world = World(drafter, DynamicTree(), kernel, 0.2)
    world.run([0], 200)
    quality[0] = 0.9
    world.run([1], 100)
    assert np.mean(world.sizes[-60:]) > 2.5


def test_a_pause_ends_with_a_new_request() -> None:
    """A text that the drafter does not know says little of the next one."""
    drafter = Chain(lambda request: 0.0, claims=0.5)
    sizer = DynamicTree().bind(StepCost((1, 8, 64), (1.0, 2.0, 16.0)), drafter)

    def step(request: RequestState) -> int:
        plan = sizer.plan([request], 64)
        drafted = sizer.trim(plan, drafter.draft([request], plan.budgets))
        sizer.observe(drafted, Outcome([[0]], drafted.trees.width, 2.0, 0.5))  # type: ignore[union-attr]
        return plan.budgets[0]

    lost = RequestState(0, [1, 5], 2, 10**6)
    budgets = [step(lost) for _ in range(200)]
    assert budgets.count(0) > 100
    while step(lost):  # up to the beginning of a pause
        pass
    known = RequestState(1, [1, 5], 2, 10**6)
    assert all(step(known) > 0 for _ in range(2))


def test_rows_that_prepare_are_attached_where_they_pay() -> None:
    """And to no more nodes than are worth it."""

    world = World(Chain(lambda request: 0.7, most=3, attaches=1), DynamicTree(), kernel)
    speed = np.mean([world.run([i], 150) for i in range(8)])
    assert np.mean(world.prepared) > 0.9
    best = best_static(0.7, lambda rows: kernel(rows + 1), most=3)  # a row attached to the root alone
    assert speed > 0.94 * best > 1.2 / kernel(1)


@pytest.mark.parametrize(("last", "attach_to"), [(1.02, 4), (1.16, 3), (1.5, 1)])
def test_rows_are_attached_to_as_many_nodes_as_hardly_cost_more(last: float, attach_to: int) -> None:
    drafter = Chain(lambda request: 0.7, most=3, attaches=4)
    sizer = DynamicTree().bind(StepCost((1, 8, 40), (1.0, 1.0, last)), drafter)
    request = RequestState(0, [1, 5], 2, 100)
    for _ in range(2):
        plan = sizer.plan([request], 64)
        plan = sizer.trim(plan, drafter.draft([request], plan.budgets))
    assert plan.trees is not None
    assert plan.trees.sizes == (4,)
    assert plan.attach_to == attach_to


# ------------------------------------------------------------------------------- who shares what


def test_what_is_learned_is_shared_by_engines_and_what_is_bound_is_not() -> None:
    shape = DynamicTree(cost=StepCost((1, 8, 64), (1.0, 3.0, 19.0)))
    first = World(Chain(lambda request: 0.0, claims=0.9), shape, kernel)
    first.run([0], 300)
    second = World(Chain(lambda request: 0.0, claims=0.9), shape, kernel)
    second.run([1], 20)
    assert sum(map(sum, second.sizes)) < 10  # the first engine has found out
    fresh = World(Chain(lambda request: 0.0, claims=0.9), DynamicTree(), kernel)
    fresh.run([2], 20)
    assert sum(map(sum, fresh.sizes)) > 10
    assert first.sizer is not second.sizer


def test_one_shape_may_serve_drafters_of_different_ways() -> None:
    """A trie first, and then heads whose drafts have to be prepared."""
    shape = DynamicTree()
    for attaches in (0, 1):
        world = World(Chain(lambda request: 0.7, attaches=attaches), shape, kernel)
        world.run([attaches], 40)
        assert np.mean(world.sizes) > 1


def test_threads_may_share_a_shape() -> None:
    shape = DynamicTree()
    worlds = [World(Chain(lambda request: 0.6), shape, kernel) for _ in range(4)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(6):
                worlds[number].run([100 * number + turn], 60)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(world.steps == 360 for world in worlds)


# ------------------------------------------------------------------------------- options


@pytest.mark.parametrize("options", [{"cost": "cheap"}, {"max_nodes": 0}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(options))} is"):
        DynamicTree(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"node_budget": -1}, {"node_budget": 2, "attach_to": 0}])
def test_bad_options_of_a_fixed_size(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(node_budget|attach_to) is"):
        Fixed(**options)


def test_somebody_has_to_know_what_steps_cost() -> None:
    with pytest.raises(ValueError, match="give `bind` a StepCost"):
        DynamicTree().bind(None, Chain(lambda request: 0.5))


# ------------------------------------------------------------------------------- in the engine

PROMPTS = prompts((12, 12), seed=4)


def run(drafter: Drafter, shape: DynamicTree, new: int, **options: object) -> Any:
    engine = Engine(build("llama"), drafter=drafter, shape=shape, slots=1, **options)
    request = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=new))
    engine.run()
    return request


def answer(new: int) -> list[int]:
    engine = Engine(build("llama"))
    request = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=new))
    engine.run()
    return request.tokens


def test_nothing_accepted_leads_to_roots_alone() -> None:
    drafter = RandomTree({}, seed=1)  # knows nothing: random draft tokens among 97
    shape = DynamicTree(cost=StepCost((1, 2, 64), (1.0, 1.2, 10.0)))
    request = run(drafter, shape, 200, reject_drafts=True)
    assert request.stats.accepted == 0
    assert request.stats.steps == 200
    assert request.stats.drafted < 200  # at first its probabilities are believed
    again = run(drafter, shape, 200, reject_drafts=True)
    assert again.stats.drafted < 40


def test_nothing_pays_where_rows_cost_as_much_as_tokens() -> None:
    drafter = RandomTree({tuple(PROMPTS[0]): answer(40)}, seed=1)
    assert run(drafter, DynamicTree(cost=STEEP), 40).stats.drafted == 0
    assert run(drafter, DynamicTree(cost=FLAT), 40).stats.accepted > 10


def test_a_step_with_a_clock_of_its_own() -> None:
    """The clock is the caller's: steps that it says take ten seconds each are learned as such."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    engine = Engine(build("llama"), drafter=RandomTree({}, seed=1), shape=DynamicTree(), slots=1, clock=clock)
    engine.add(PROMPTS[0], SamplingParams(max_new_tokens=30))
    engine.run()
    assert 1.0 < engine.loop.sizer._times.plain(1) < 60.0


def test_what_steps_take_is_forgotten_with_the_runner_that_it_was_measured_on() -> None:
    shape, cost = DynamicTree(), StepCost((1, 2, 64), (1.0, 1.2, 10.0))
    first, second = (shape.bind(cost, RandomTree({}, seed=1)) for _ in range(2))
    assert first._times is second._times
    del cost
    gc.collect()
    assert len(shape._times) == 0


@dataclass
class Unhashable(RandomTree):
    """A user's drafter that compares by value, so that it has no hash."""

    value: int = 3


def test_a_drafter_without_a_hash_has_a_shape_of_its_own_and_its_budget_may_change() -> None:
    drafter = Unhashable()
    RandomTree.__init__(drafter, {}, seed=1)
    assert shape_for(drafter) is shape_for(drafter)
    drafter.node_budget = 4
    assert shape_for(drafter).node_budget == 4
    drafter.node_budget = 5
    assert shape_for(drafter).node_budget == 5


def test_the_default_shape_belongs_to_the_drafter_and_nothing_is_written_on_it() -> None:
    drafter = Lookahead()
    before = set(vars(drafter))
    ids = torch.tensor(PROMPTS[:1])
    generate(build("llama"), ids, drafter=drafter, max_new_tokens=8)
    learned = shape_for(drafter)
    assert isinstance(learned, DynamicTree)
    generate(build("llama"), ids, drafter=drafter, max_new_tokens=8)
    generate(build("llama"), ids, drafter=drafter, shape=Fixed(2), max_new_tokens=8)
    assert shape_for(drafter) is learned
    assert shape_for(Lookahead()) is not learned
    assert set(vars(drafter)) == before


def test_a_static_tree_of_the_drafter_is_verified_whole() -> None:
    drafter = RandomTree({}, seed=1)
    drafter.node_budget = 5
    shape = shape_for(drafter)
    assert isinstance(shape, Fixed)
    assert shape.node_budget == 5
