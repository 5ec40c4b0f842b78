"""The governor judges each request by itself; the planner knows what padding, a drafter's rows and pruning cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from in_model_driver import randomised
from zoo import build

from draftree.drafting import BiTA, Context, Lookahead, Merge
from draftree.engine import Engine, Rules
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.runner import open_runner
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed
from draftree.shaping.governor import FRUITLESS, REST_FIRST, REST_LAST, Governor
from draftree.tree import TokenTree


def context(number: int) -> Context:
    return Context(number, [3, 4, 5], 2, 1000)


def test_one_request_rests_while_another_goes_on() -> None:
    governor, good, bad = Governor(), context(1), context(2)
    asked = np.zeros(2, int)
    for _ in range(200):
        now = governor.open([good, bad])
        asked += now
        for request, ask, gain in zip((good, bad), now, (2.0, 1.0), strict=True):
            if ask:
                governor.book(request, gain, 1.5)
    assert asked[0] == 200
    assert FRUITLESS <= asked[1] < FRUITLESS + 200 / REST_LAST + 4


def test_rests_grow_and_the_step_before_the_last_says_so() -> None:
    """`resting` is told one step ahead, for drafters that have to prepare their guesses."""
    governor, request = Governor(), context(1)
    asked, resting = [], []
    for _ in range(120):
        (now,) = governor.open([request])
        if now:
            governor.book(request, 1.0, 2.0)
        asked.append(now)
        resting.append(request.resting)
    times = [i for i, now in enumerate(asked) if now]
    assert times[:FRUITLESS] == list(range(FRUITLESS))
    rests = np.diff(times[FRUITLESS - 1 :]) - 1
    assert rests.tolist() == [min(REST_FIRST * 2**i, REST_LAST) for i in range(len(rests))]
    assert all(asked[i + 1] == (not resting[i]) for i in range(119))


def test_a_new_request_begins_with_what_the_others_found() -> None:
    governor = Governor()
    for number in range(3):
        for _ in range(50):
            request = context(number)
            if governor.open([request])[0]:
                governor.book(request, 1.0, 2.0)
    asked = 0
    for _ in range(50):
        if governor.open([context(9)])[0]:
            governor.book(context(9), 1.0, 2.0)
            asked += 1
    assert asked < FRUITLESS  # it begins within a rest, and one fruitless step more is enough
    governor.right([9])
    assert governor.open([context(9)]) == [False]  # a right guess does not outweigh steps of twice the time
    governor._of[9].hoped = 0.95 * governor._of[9].spent
    governor.right([9])
    assert governor.open([context(9)]) == [True]
    governor.end(context(9))
    assert 9 not in governor._of


def test_in_a_batch_only_those_are_drafted_for_whose_guesses_hold() -> None:
    """One answer is known to the drafter, the other is not: the known one keeps its speed."""
    rows = prompts((12, 12), seed=4)
    plain = Engine(build("llama"), slots=2)
    wanted = [plain.add(row, Rules(max_new_tokens=150)) for row in rows]
    plain.run()
    drafter = RandomTree({tuple(rows[0]): wanted[0].tokens}, seed=1)
    shape = DynamicTree(cost=StepCost((1, 2, 4, 64), (1.0, 1.05, 1.2, 9.0)))
    engine = Engine(build("llama"), slots=2, drafter=drafter, shape=shape)
    requests = [engine.add(row, Rules(max_new_tokens=150)) for row in rows]
    engine.run()
    assert [r.tokens for r in requests] == [r.tokens for r in wanted]
    known, unknown = (r.stats for r in requests)
    assert known.acceptance_length > 1.4
    assert unknown.drafted / unknown.steps < 0.5 * known.drafted / known.steps


probability = st.sampled_from([0.9, 0.6, 0.6, 0.3, 0.05, 0.0])
rises = st.lists(st.floats(0.0, 0.5), min_size=15, max_size=15)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(probability, min_size=4, max_size=4), min_size=2, max_size=3), rises)
def test_with_padding_the_choice_is_the_best_of_all(guesses: list[list[float]], steps: list[float]) -> None:
    cost = StepCost(range(1, 17), 1 + np.concatenate([[0.0], np.cumsum(steps)]))
    worth = np.array([[0.0, *row] for row in guesses])
    batch = len(worth)
    shape = DynamicTree()
    shape.bind(cost, packed=False)
    chosen = shape.choose(worth)

    def rate(sizes: tuple[int, ...]) -> float:
        gain = sum(np.sort(row)[::-1][:n].sum() for row, n in zip(worth, sizes, strict=True))
        return float((batch + gain) / cost.of(batch * (1 + max(sizes))))

    best = max(rate(sizes) for sizes in itertools.product(range(5), repeat=batch))
    assert rate(tuple(chosen)) == pytest.approx(best, rel=1e-9)


def test_batches_have_curves_of_their_own() -> None:
    """Sixteen requests' contexts take six times as long to read as one's, whatever guesses follow; its curve stays."""
    cost = StepCost((1, 16, 32, 64), (1.0, 2.0, 3.0, 6.0))
    shape = DynamicTree()
    shape.bind(cost, packed=False)
    requests = [context(i) for i in range(16)]
    for _ in range(60):
        shape.budgets(requests, 8)
        shape.learn(requests, [[0]] * 16, [1] * 16)
        shape.clock(16, 8.0, 8.0)
    assert cost.seconds.tolist() == [1.0, 2.0, 3.0, 6.0]
    assert shape.planner.plain(16) == pytest.approx(8.0, rel=0.02)
    assert shape.planner.seconds(16, 2, attached=False)[1] == pytest.approx(9.0, rel=0.02)
    assert shape.planner.plain(2) < 2.0


def test_trees_grow_where_most_of_them_leaves_on_the_way() -> None:
    cost = StepCost((1, 64), (1.0, 8.0))
    early = EarlyPruning(EarlyHead.fresh(build("llama"), layer=1), always=True)
    early.bind(open_runner(build("llama")), cost)
    worth = np.array([[0.0, 0.6, 0.3, 0.16, 0.12, 0.1, 0.09]])
    plain, pruned = DynamicTree(), DynamicTree()
    plain.bind(cost)
    pruned.bind(cost, None, early)
    every = torch.ones(1, 32, dtype=torch.bool)
    few = every.clone()
    few[0, 4:] = False
    for _ in range(100):
        early.note(few, every, 1e-6, 32)
    assert pruned.choose(worth)[0] > plain.choose(worth)[0]
    assert pruned.planner.seconds(1, 7, attached=False)[6] < plain.planner.seconds(1, 7, attached=False)[6]


def test_what_needs_no_preparing_goes_on_while_the_rest_rests() -> None:
    """A trie beside masks that never guess right: their rows are dropped, and the trie still brings what it brings."""
    model, row = build("llama"), prompts((12,), seed=4)[0]
    plain = Engine(model)
    wanted = plain.add(row, Rules(max_new_tokens=150))
    plain.run()
    cost = StepCost((1, 3, 4, 64), (1.0, 1.05, 3.0, 60.0))  # a guess or two of a trie are cheap, three masks are not
    accepted = []
    for others in ([], [randomised(BiTA.fresh(model), 3.0)]):
        trie = Lookahead()
        trie.warm([wanted.tokens])
        engine = Engine(model, drafter=Merge([trie, *others]), shape=DynamicTree(cost=cost))
        request = engine.add(row, Rules(max_new_tokens=150))
        engine.run()
        assert request.tokens == wanted.tokens
        accepted.append(request.stats.accepted)
    assert accepted[0] > 20
    assert accepted[1] > 0.6 * accepted[0]


def test_fixed_shapes_may_say_how_many_nodes_look_ahead() -> None:
    request = context(1)
    Fixed(4, spawn=2).budgets([request], 64)
    assert request.spawn == 2
    Fixed(4).budgets([request], 64)
    assert request.spawn is None
    with pytest.raises(ValueError, match="spawn is 0"):
        Fixed(4, spawn=0)


def test_trees_that_were_cut_stay_the_requests_own() -> None:
    """Padded or packed, each request's guesses are its own best ones."""
    trees = TokenTree.stack(
        [TokenTree.from_paths(5, [[6, 7], [8]], [[-0.1, -0.1], [-0.2]]), TokenTree.from_paths(5, [[9]], [[-3.0]])]
    )
    for packed in (True, False):
        shape = DynamicTree()
        shape.bind(StepCost((1, 2, 4, 5, 64), (1.0, 1.01, 1.02, 3.0, 90.0)), packed=packed)
        found = shape.trim([context(1), context(2)], trees)
        assert found.tokens[0, :2].tolist() == [5, 6]
        assert found.sizes == ((3, 1) if packed else (2, 2))


@pytest.mark.parametrize("ahead", [0, 1])
def test_most_steps_of_a_rest_are_not_looked_at(ahead: int) -> None:
    """They count as rest all the same, and a request that has just come, or is asked next, is never passed over."""
    governor, request = Governor(), context(1)
    assert not governor.quiet([request], ahead=ahead)  # nothing is known of it
    for _ in range(FRUITLESS):
        assert governor.open([request]) == [True]
        governor.book(request, 1.0, 2.0)
    assert request.resting
    quiet = governor.quiet([request], ahead=ahead)
    assert quiet == REST_FIRST - ahead
    governor.elapse([1], quiet)
    assert not governor.quiet([request], ahead=ahead)
    if ahead:
        assert governor.open([request]) == [False]  # the last step of the rest prepares the next one
        assert not request.resting
    assert governor.open([request]) == [True]
    assert not governor.quiet([request, context(2)], ahead=ahead)


def test_a_course_weighs_as_much_as_its_steps() -> None:
    """Little luck in a few steps is borne with, the same in many is not; and a rest follows at once."""
    for steps, rests in ((4, False), (31, True)):
        governor, request = Governor(), context(1)
        governor.awake([request], ahead=0, hopeful=lambda: False)
        governor.settle(request, 1.0, 1.2, steps)
        assert request.resting == rests
        assert governor.quiet([request], ahead=0) == (REST_FIRST if rests else 0)
        governor.settle(request, 2.0, 1.2, 31)
        assert not governor.losing


def test_new_requests_are_tried_where_others_were_worth_it() -> None:
    governor = Governor()
    for _ in range(4):
        governor.settle(context(1), 1.0, 1.5, 16)
    for number, hopeful in ((2, True), (3, False)):
        assert governor.awake([context(number)], ahead=0, hopeful=lambda hopeful=hopeful: hopeful) == [hopeful]


def test_what_promises_little_is_tried_once_behind_each_longest_rest() -> None:
    governor, request, tries, rests = Governor(), context(1), [], []
    governor.awake([request], ahead=0, hopeful=lambda: True)
    step = 0
    while step < 1000:
        if governor.declines([request], [True]):
            rests.append(governor.quiet([request], ahead=0))
            governor.elapse([1], rests[-1])
            step += rests[-1]
        else:
            tries.append(step)
            step += 1
    assert rests[:4] == [REST_FIRST, 2 * REST_FIRST, 4 * REST_FIRST, REST_LAST]
    assert np.diff(tries).tolist() == [REST_LAST + 1] * (len(tries) - 1)


def test_rests_of_a_batch_end_together() -> None:
    """Requests that went to rest at different steps are asked in the same ones, as one costs nearly as much as all."""
    governor, requests = Governor(), [context(i) for i in range(3)]
    asked_in = []
    for step in range(240):
        if governor.quiet(requests, ahead=0):
            governor.elapse([request.id for request in requests])
            continue
        asked = governor.open(requests)
        if step > 80 and any(asked):
            asked_in.append(governor._steps)
        for number, (request, part) in enumerate(zip(requests, asked, strict=True)):
            if part and step >= 2 * number:  # they begin to lose one after the other
                governor.book(request, 1.0, 2.0)
    assert 3 <= len(asked_in) <= 6
    assert len({step % 32 for step in asked_in}) == 1


def test_rests_go_on_in_steps_that_are_not_planned() -> None:
    governor, request = Governor(), context(1)
    for _ in range(FRUITLESS):
        governor.open([request])
        governor.book(request, 1.0, 2.0)
    governor.elapse([1], REST_FIRST)
    assert governor.open([request]) == [True]
