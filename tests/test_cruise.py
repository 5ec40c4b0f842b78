"""Steps between two plans: sizes that have been best of late, and none where drafting does not pay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from draftree.drafting import Context
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree
from draftree.shaping.cells import Reach
from draftree.shaping.compiled import AHEAD, LEVELS, PARTS
from draftree.shaping.cruise import FIRST, LOOK_EVERY, LOOK_LEAST, Cruise, Kind, Pace
from draftree.shaping.dynamic import PAUSE
from draftree.tree import TokenTree

CHEAP, DEAR = np.linspace(1.0, 2.0, 100), np.arange(1.0, 101.0)


def pace(seconds: np.ndarray, aside: float = 0.0, batch: int = 1) -> Pace:
    return Pace(seconds, aside, float(seconds[batch - 1]))


def request_of(number: int) -> Context:
    return Context(number, [1, 2, 3], 3, 1000)


def tree_of(*counts: int) -> TokenTree:
    """Of so many likely guesses, one behind the other, for each request."""
    return TokenTree.stack([TokenTree.from_paths(0, [[5] * n] * (n > 0), [[-0.01] * n] * (n > 0)) for n in counts])


def reach_of(*guesses: float, gains: tuple[float, ...], seconds: float = 1.0) -> Reach:
    """Of all that are there, such as are expected to be so many."""
    return Reach([(LEVELS * (n > 0),) * PARTS for n in guesses], list(gains), list(guesses), seconds)


def take(cruise: Cruise, *requests: Context, walked: int = 2, there: int = 3) -> list[list[int]]:
    """Go through a course in which there are so many guesses in each step, and hold; the most of its steps."""
    found = []
    while (sizes := cruise.due(requests)) is not None:
        found.append(sizes)
        held = [min(walked, size, there) for size in sizes]
        for request, count in zip(requests, held, strict=True):
            request.tokens += [7] * (1 + count)
        cruise.learn([list(range(1 + count)) for count in held], tree_of(*(min(size, there) for size in sizes)))
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
        right, there = average.values[:2, [0, LEVELS]].tolist()  # the first guess, and the next ones
        assert right[0] > 0.85 * there[0] > 0.5
        assert right[1] < 0.4 * there[1]
    fruitless = Cruise()
    fruitless.explore([one], [True], pace(CHEAP), packed=True)
    assert len(take(fruitless, one, walked=0)) == LOOK_EVERY  # nothing comes of it
    assert fruitless.over([one])[0].gain == 1.0
    assert fruitless.known


def test_courses_that_pay_grow_longer_and_end_in_a_plan() -> None:
    one = request_of(1)
    cruise = known(one)
    cruise.set_out([one], reach_of(3.0, gains=(3.0,)), [True], pace(CHEAP), packed=True)
    assert len(take(cruise, one)) == Kind.CRUISE.value  # the first one was a trial
    assert cruise.plan_due
    cruise.over([one])
    cruise.set_out([one], reach_of(3.0, gains=(3.0,)), [True], pace(CHEAP), packed=True)
    assert not cruise.plan_due
    fresh = known(one, walked=0)
    fresh.set_out([one], reach_of(3.0, gains=(3.0,)), [True], pace(CHEAP), packed=True)
    assert len(take(fresh, one)) == Kind.TRIAL.value  # what was tried before did not pay


def test_steps_that_do_not_pay_are_given_up_soon() -> None:
    """They bring a token each and take 1.5 of a plain step: a little patience, and the course is over."""
    for walked, steps in ((0, LOOK_EVERY), (1, Kind.CRUISE.value)):
        one = request_of(1)
        cruise = known(one)
        cruise.set_out([one], reach_of(5.0, gains=(3.5,)), [True], pace(1 + 0.1 * DEAR), packed=True)
        assert len(take(cruise, one, walked=walked, there=5)) == steps
        assert [course.gain for course in cruise.over([one])] == [1 + walked]
        assert cruise.plan_due == bool(walked)


def test_many_requests_need_less_patience_than_one() -> None:
    """No guess is right, and a step takes a tenth longer than a plain one: one request may owe that to luck."""
    for count in (1, 16):
        requests = [request_of(i) for i in range(count)]
        cruise = known(*requests, walked=0)
        seconds = np.concatenate([np.ones(count), np.full(count * AHEAD, 1.1)])
        reach = reach_of(*[1.0] * count, gains=(1.5,) * count)
        cruise.set_out(requests, reach, [True] * count, pace(seconds, batch=count), packed=True)
        assert len(take(cruise, *requests, walked=0, there=1)) == (Kind.TRIAL.value if count == 1 else LOOK_LEAST)


def test_another_batch_ends_a_course() -> None:
    one, two, three = request_of(1), request_of(2), request_of(3)
    cruise = known(one, two)
    cruise.set_out([one, two], reach_of(4, 0, gains=(3.5, 1.0)), [True, False], pace(CHEAP, batch=2), packed=True)
    assert [size > 0 for size in cruise.due([one, two]) or ()] == [True, False]  # where it does not pay, nothing
    one.tokens += [7, 7]
    cruise.learn([[0, 1], [0]], tree_of(4, 0))
    cruise.end(2)
    (course,) = cruise.over([three, one])  # those who are still there are told of what was
    assert (course.request, course.gain, course.steps) == (one, 2.0, 1)
    assert not cruise.running
    cruise.set_out([one], reach_of(4.0, gains=(3.5,)), [True], pace(CHEAP), packed=True)
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
            cruise.learn([[0, 1]], tree_of(FIRST))
        cruise.end(number)
    (average,) = cruise.averages([request_of(9)], [True])
    assert average is not None
    right, there = average.values[:2, [0, LEVELS]].tolist()
    assert right[0] > 0.8 * there[0] > 0.5
    assert right[1] < 0.2 * there[1]


def test_a_course_whose_steps_came_to_nothing_tells_nothing() -> None:
    request = request_of(1)
    cruise = known(request)
    (average,) = cruise.averages([request], [True])
    assert average is not None
    before = average.values.copy()
    cruise.set_out([request], reach_of(4.0, gains=(3.5,)), [True], pace(CHEAP), packed=True)
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


def test_what_is_promised_is_what_plain_steps_would_bring() -> None:
    """Of the requests that take part one has no guesses that pay: its likeliest are looked at all the same."""
    one, two = request_of(1), request_of(2)
    cruise = known(one, two)
    promise = cruise.set_out(
        [one, two],
        reach_of(2, 0, gains=(2.5, 1.0), seconds=1.5),
        [True, True],
        pace(1 + 0.1 * DEAR, batch=2),
        packed=True,
    )
    right, there = cruise._average(2).values[:2, 0]
    assert promise == pytest.approx((2.5 + 1.0 + right) * 1.2 / (1.5 + 0.1 * there) / 2)
    assert one.least == (-np.inf,) * PARTS
    assert two.least == (-0.25, 0.0, 0.0)


def test_time_goes_by_the_guesses_there_were() -> None:
    """Nothing was found in half of the steps, and one request has three times as many guesses as the other."""
    one, two = request_of(1), request_of(2)
    cruise = known(one, two)
    seconds = pace(1 + 0.1 * DEAR, aside=0.12, batch=2)
    cruise.set_out([one, two], reach_of(3, 3, gains=(2.0, 2.0)), [True, True], seconds, packed=True)
    for guesses in ((3, 1), (0, 0)) * 4:
        assert cruise.due([one, two]) is not None
        for request in (one, two):
            request.tokens += [7] * 3
        cruise.learn([[0], [0]], tree_of(*guesses))
    spent = {course.request.id: course.spent for course in cruise.over([one, two])}
    assert spent[1] == pytest.approx(1 + 0.1 + 2 * 0.1 * 1.5 / 1.2)  # of 1.2 seconds, twelve hundredths aside
    assert spent[2] == pytest.approx(1 + 0.1 + 2 * 0.1 * 0.5 / 1.2)


def test_courses_are_taken_for_as_slow_as_they_were() -> None:
    """Their beginnings and ends take time too: by so much courses of as many requests have to bring more."""
    one = request_of(1)
    cruise = known(one)
    assert cruise.slower(1) == 1.0
    for longer, slower in ((1.1, 1.1), (9.0, 1.2), (0.5, 1.0)):  # within bounds
        for _ in range(40):
            cruise.set_out([one], reach_of(3.0, gains=(3.0,)), [True], pace(1 + 0.1 * DEAR), packed=True)
            for _ in range(10):
                cruise.due([one])
                one.tokens += [7] * 4
                cruise.learn([[0, 1, 2, 3]], tree_of(3))
                cruise.took(1.4 * longer)
            cruise.over([one])
        assert cruise.slower(1) == pytest.approx(slower, rel=0.01)
        assert cruise.slower(2) == 1.0
    seconds = pace(1 + 0.1 * DEAR)
    assert seconds._replace(slower=1.1).longer(4) == pytest.approx(1.1 * seconds.longer(4))


def test_averages_are_the_requests_own() -> None:
    cruise = Cruise()
    first, none = cruise.averages([request_of(1), request_of(2)], [True, False])
    assert none is None
    assert first is not None
    assert first.tried == 0
    assert cruise.averages([request_of(1)], [True]) == [first]
    cruise.end(1)
    assert cruise.averages([request_of(1)], [True]) != [first]


def decode(
    shape: DynamicTree, request: Context, steps: int, seconds: list[float], right: int, aside: float = 0.0
) -> list[tuple[str, int]]:
    """Steps in which so many guesses are right; what each was, and its guesses. To ask for them takes time `aside`."""
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
        shape.learn([request], [list(range(held + 1))], tree)
        shape.clock(tree.sizes[0], seconds[tree.sizes[0] - 1], seconds[tree.sizes[0] - 1] + aside)
        found.append(("plan" if shape.calibration._offered > plan else "steady", tree.sizes[0] - 1))
    return found


def test_most_steps_are_not_planned_where_drafting_pays() -> None:
    request = request_of(7)
    shape = DynamicTree(cost=StepCost((1, 64), (1.0, 4.0)))
    shape.bind(StepCost((1, 2), (1.0, 2.0)))
    steps = decode(shape, request, 700, [1.0] * 100, right=3)
    assert [kind for kind, _ in steps].count("plan") == 2  # a first course, and eight cruises before each
    assert [kind for kind, _ in steps].count("steady") == 698
    assert {size for kind, size in steps[-31:] if kind == "steady"} == {4}  # a part of a tree goes together


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
    steps = decode(shape, request, 1000, seconds, right=0, aside=1e-4)
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
