"""Steps between two plans: sizes that have been best of late, and none where drafting does not pay."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from draftree.drafting import Context
from draftree.host.cost import StepCost
from draftree.shaping import DynamicTree
from draftree.shaping.average import OTHERS, Average, CompiledAverage, new_average
from draftree.shaping.counts import AHEAD, Sizes
from draftree.shaping.cruise import FIRST, LOOK_EVERY, Cruise, Kind, Pace
from draftree.shaping.dynamic import PAUSE
from draftree.tree import TokenTree

CHEAP, DEAR = np.linspace(1.0, 2.0, 100), np.arange(1.0, 101.0)


def pace(seconds: np.ndarray, aside: float = 0.0, batch: int = 1) -> Pace:
    return Pace(seconds, aside, float(seconds[batch - 1]))


def request_of(number: int) -> Context:
    return Context(number, [1, 2, 3], 3, 1000)


def take(cruise: Cruise, *requests: Context, walked: int = 2, there: int = 99) -> list[list[int]]:
    """Go through a course in which so many guesses hold in each step; the sizes of its steps."""
    found = []
    while (sizes := cruise.due(requests)) is not None:
        found.append(sizes)
        held = [min(walked, size, there) for size in sizes]
        for request, count in zip(requests, held, strict=True):
            request.tokens += [7] * (1 + count)
        cruise.learn([list(range(1 + count)) for count in held], [1 + min(size, there) for size in sizes])
    return found


def known(*requests: Context, walked: int = 2) -> Cruise:
    """Of a first course in which so many guesses held."""
    cruise = Cruise()
    cruise.explore(requests, [True] * len(requests), pace(CHEAP, batch=len(requests)), packed=True)
    take(cruise, *requests, walked=walked)
    cruise.over(requests)
    return cruise


def test_a_first_course_finds_out_what_guesses_bring() -> None:
    one, two, cruise = request_of(1), request_of(2), Cruise()
    assert not cruise.known
    cruise.explore([one, two], [True, False], pace(CHEAP, batch=2), packed=True)
    size = -(-FIRST // 2)  # of each of two
    assert take(cruise, one, two, walked=1) == [[size, 0]] * (Kind.FIRST.value // 2)
    (course,) = cruise.over([one, two])
    assert (course.request, course.gain, course.steps) == (one, 2.0, Kind.FIRST.value // 2)
    assert cruise.over([one, two]) == []  # told once
    assert cruise.known
    for request in (one, two):  # the other one is taken for such as have been
        (average,) = cruise.averages([request], [True])
        assert average is not None
        np.testing.assert_allclose(average.values[:2, :size], [[1.0, 0.0], [1.0, 1.0]])
    fruitless = Cruise()
    fruitless.explore([one], [True], pace(CHEAP), packed=True)
    assert len(take(fruitless, one, walked=0)) == LOOK_EVERY  # nothing comes of it
    assert fruitless.over([one])[0].gain == 1.0
    assert fruitless.known


def test_courses_that_pay_grow_longer_and_end_in_a_plan() -> None:
    one = request_of(1)
    cruise = known(one)
    cruise.set_out([one], Sizes([3], [3.0]), [True], pace(CHEAP), packed=True)
    assert len(take(cruise, one)) == Kind.CRUISE.value  # the first one was a trial
    assert cruise.plan_due
    cruise.over([one])
    cruise.set_out([one], Sizes([3], [3.0]), [True], pace(CHEAP), packed=True)
    assert not cruise.plan_due
    fresh = known(one, walked=0)
    fresh.set_out([one], Sizes([3], [3.0]), [True], pace(CHEAP), packed=True)
    assert len(take(fresh, one)) == Kind.TRIAL.value  # what was tried before did not pay


def test_steps_that_do_not_pay_are_given_up_soon() -> None:
    """They bring a token each and take 1.5 of a plain step: a little patience, and the course is over."""
    for walked, steps in ((0, LOOK_EVERY), (1, Kind.CRUISE.value)):
        one = request_of(1)
        cruise = known(one)
        cruise.set_out([one], Sizes([5], [3.5]), [True], pace(1 + 0.1 * DEAR), packed=True)
        assert len(take(cruise, one, walked=walked)) == steps
        assert [course.gain for course in cruise.over([one])] == [1 + walked]
        assert cruise.plan_due == bool(walked)


def test_many_requests_need_less_patience_than_one() -> None:
    """No guess is right, and a step takes a tenth longer than a plain one: one request may owe that to luck."""
    for count in (1, 16):
        requests = [request_of(i) for i in range(count)]
        cruise = known(*requests, walked=0)
        seconds = np.concatenate([np.ones(count), np.full(count * AHEAD, 1.1)])
        sizes = Sizes([1] * count, [1.5] * count)
        cruise.set_out(requests, sizes, [True] * count, pace(seconds, batch=count), packed=True)
        assert len(take(cruise, *requests, walked=0)) == (Kind.TRIAL.value if count == 1 else LOOK_EVERY)


def test_another_batch_ends_a_course() -> None:
    one, two, three = request_of(1), request_of(2), request_of(3)
    cruise = known(one, two)
    cruise.set_out([one, two], Sizes([4, 2], [3.5, 1.5]), [True, False], pace(CHEAP, batch=2), packed=True)
    assert cruise.due([one, two]) == [4, 0]  # nothing for a request that drafting does not pay for
    one.tokens += [7, 7]
    cruise.learn([[0, 1], [0]], [5, 1])
    cruise.end(2)
    (course,) = cruise.over([three, one])  # those who are still there are told of what was
    assert (course.request, course.gain, course.steps) == (one, 2.0, 1)
    assert not cruise.running
    cruise.set_out([one], Sizes([4], [3.5]), [True], pace(CHEAP), packed=True)
    cruise.due([one])
    cruise.end(1)
    assert not cruise.running  # nobody is left


def test_answers_shorter_than_a_course_tell_of_guesses_too() -> None:
    cruise = Cruise()
    for number in range(3):
        request = request_of(number)
        assert cruise.known == (number > 1)
        cruise.explore([request], [True], pace(CHEAP), packed=True)
        for _ in range(3):
            cruise.due([request])
            cruise.learn([[0, 1]], [1 + FIRST])
        cruise.end(number)
    (average,) = cruise.averages([request_of(9)], [True])
    assert average is not None
    np.testing.assert_allclose(average.values[0, :FIRST], [1.0, 0.0, 0.0])


def test_a_course_whose_steps_came_to_nothing_tells_nothing() -> None:
    request = request_of(1)
    cruise = known(request)
    (average,) = cruise.averages([request], [True])
    assert average is not None
    before = average.values.copy()
    cruise.set_out([request], Sizes([4], [3.5]), [True], pace(CHEAP), packed=True)
    cruise.due([request])
    assert cruise.over([request]) == []
    np.testing.assert_array_equal(average.values, before)


def test_newcomers_do_not_end_a_course() -> None:
    """Their prompts are read in a pass of their own, in which nothing is guessed; then they join."""
    old, new = request_of(1), request_of(2)
    shape = DynamicTree(cost=StepCost((1, 64), (1.0, 1.5)))
    shape.bind(StepCost((1, 2), (1.0, 2.0)))
    decode(shape, old, 20, [1.0] * 100, right=3)
    before = shape._cruise._taken
    assert before
    assert shape.rests([new])
    assert shape._cruise._taken == before
    assert not shape.rests([old, new])
    assert shape._steady is not None
    assert min(shape._steady) > 0


def test_what_is_promised_counts_padding_and_guesses_that_are_seldom_there() -> None:
    one, two = request_of(1), request_of(2)
    promised = []
    for packed, there in ((True, 99), (False, 99), (True, 0)):
        cruise = Cruise()
        cruise.explore([one, two], [True, True], pace(CHEAP, batch=2), packed=True)
        take(cruise, one, two, there=there)
        cruise.over([one, two])
        seconds = pace(1 + 0.1 * DEAR, batch=2)
        promised.append(cruise.set_out([one, two], Sizes([3, 0], [2.0, 1.0]), [True, False], seconds, packed=packed))
    assert promised == pytest.approx([3 / (1.5 / 1.2) / 2, 3 / (1.8 / 1.2) / 2, 3 / 2])


def test_averages_are_the_requests_own() -> None:
    cruise = Cruise()
    first, none = cruise.averages([request_of(1), request_of(2)], [True, False])
    assert none is None
    assert first is not None
    assert first.values.tolist() == [[0.0] * AHEAD] * 3
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
    average.add(np.array([0.5]))
    average.add(np.array([0.5]))
    fresh = Average(0.95, average)
    np.testing.assert_allclose(fresh.values[:2], average.values[:2])
    assert fresh.past == OTHERS / (OTHERS + 1)  # the others count as much as a few trees
    assert Average(0.6, Average(0.6)).past == 0.0  # if anything is known of them


def test_an_average_learns_from_walks() -> None:
    """In 16 steps with up to three guesses, then in 8 with up to five; what was not tried goes on as it fell."""
    average = Average(0.9)
    average.learn([16, 8, 5, 2], [2, 1, 1, 12])
    np.testing.assert_allclose(average.values[0, :4], np.array([8, 5, 2, 1]) / 16)
    np.testing.assert_allclose(average.values[1, :4], np.array([14, 13, 12, 12]) / 16)
    np.testing.assert_allclose(average.values[2, :4], [16, 16, 16, 0])
    average.learn([8, 8, 8, 8, 4, 0], [0, 0, 0, 0, 0, 8])
    assert average.values[0, 0] > 0.65
    assert 0.0 < average.values[0, 4] < average.values[0, 3] < 0.5
    assert (np.diff(average.values[0, 5:]) < 0).all()
    assert average.known


def test_the_compiled_average_is_the_plain_one() -> None:
    if not isinstance(new_average(0.9), CompiledAverage):
        pytest.skip("draftree was built without a C compiler")
    random = np.random.default_rng(5)
    plain, compiled = Average(0.9), CompiledAverage(0.9)
    for _ in range(200):
        if random.random() < 0.05:
            plain, compiled = Average(0.9), CompiledAverage(0.9, Average(0.9))
        size, steps = int(random.integers(1, AHEAD + 2)), int(random.integers(1, 32))
        sizes = random.integers(0, size + 1, steps)
        walks = [int(random.integers(0, of + 1)) * (random.random() < 0.7) for of in sizes]
        right = [sum(walk >= node for walk in walks) for node in range(size + 1)]
        trees = [int((sizes == of).sum()) for of in range(size + 1)]
        weight = float(random.choice([1.0, 0.25]))
        for average in (plain, compiled):
            average.learn(right, trees, weight)
        np.testing.assert_allclose(compiled.values, plain.values)
        assert (plain.values[:2] >= 0).all()
        assert (plain.values[:2] <= 1).all()


def test_a_copy_learns_by_itself() -> None:
    """Its values lie elsewhere, and what is compiled writes there."""
    average = new_average(0.9)
    average.learn([4, 2], [0, 4])
    before, copied = average.values.copy(), copy.deepcopy(average)
    copied.learn([8, 8], [0, 8])
    np.testing.assert_array_equal(average.values, before)
    assert copied.values[0, 0] > before[0, 0]
    average.learn([8, 8], [0, 8])
    np.testing.assert_array_equal(average.values, copied.values)


def decode(shape: DynamicTree, request: Context, steps: int, seconds: list[float], right: int) -> list[tuple[str, int]]:
    """Steps in which so many guesses are right; what each was, and its guesses."""
    found = []
    for _ in range(steps):
        plan = shape.calibration._offered
        if shape.rests([request]):
            found.append(("rest", 0))
            request.tokens.append(9)
            shape.rested(1, seconds[0], seconds[0])
            continue
        (budget,) = shape.budgets([request], 64)
        assert 0 < budget <= shape.max_nodes
        drafted = TokenTree.from_paths(request.tokens[-1], [[5] * budget], [[-0.05] * budget])
        tree = shape.trim([request], drafted)
        held = min(right, tree.sizes[0] - 1)
        request.tokens += [5] * held + [9]
        shape.learn([request], [list(range(held + 1))], tree.sizes)
        shape.clock(tree.sizes[0], seconds[tree.sizes[0] - 1], seconds[tree.sizes[0] - 1])
        found.append(("plan" if shape.calibration._offered > plan else "steady", tree.sizes[0] - 1))
    return found


def test_most_steps_are_not_planned_where_drafting_pays() -> None:
    request = request_of(7)
    shape = DynamicTree(cost=StepCost((1, 64), (1.0, 4.0)))
    shape.bind(StepCost((1, 2), (1.0, 2.0)))
    steps = decode(shape, request, 200, [1.0] * 100, right=3)
    assert [kind for kind, _ in steps].count("plan") == 5
    assert [kind for kind, _ in steps].count("steady") == 195
    assert {size for kind, size in steps[-31:] if kind == "steady"} == {3}


def test_sizes_grow_as_far_as_guesses_hold() -> None:
    request = request_of(7)
    shape = DynamicTree(cost=StepCost((1, 64), (1.0, 1.001)))
    shape.bind(StepCost((1, 2), (1.0, 2.0)))
    steps = decode(shape, request, 200, [1.0] * 100, right=20)
    assert steps[0] == ("steady", FIRST)
    assert steps[-1][1] >= 20


def test_a_drafter_that_is_never_right_is_asked_in_few_steps() -> None:
    """A first course, plain steps, so that it is known what they take, and trials further and further apart."""
    request = request_of(7)
    shape = DynamicTree()
    seconds = [1e-3 * (1 + 0.1 * n) for n in range(100)]
    shape.bind(StepCost((1, 2, 4, 8, 100), [seconds[rows - 1] for rows in (1, 2, 4, 8, 100)]))
    steps = decode(shape, request, 1000, seconds, right=0)
    assert [size for _, size in steps[: LOOK_EVERY + 1]] == [FIRST] * LOOK_EVERY + [0]
    assert all(kind == "rest" for kind, _ in steps[LOOK_EVERY : LOOK_EVERY + PAUSE])
    asked = [i for i, (kind, _) in enumerate(steps) if kind != "rest"]
    assert 10 < len(asked) < 200  # where a step with guesses takes a tenth longer, and they might be right again
    first, *_, before, last = (i for i, j in itertools.pairwise(asked) if j > i + 1)
    assert last - before > 40 > first


def test_no_step_asks_for_more_than_was_allowed() -> None:
    request = request_of(7)
    shape = DynamicTree(max_nodes=4, cost=StepCost((1, 64), (1.0, 1.001)))
    shape.bind(StepCost((1, 2), (1.0, 2.0)))
    steps = decode(shape, request, 100, [1.0] * 100, right=9)
    assert max(size for _, size in steps) == 4
