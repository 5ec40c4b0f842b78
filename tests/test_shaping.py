"""Shapes: the chosen size is the best one, calibration finds the truth, fruitless drafting stops and comes back."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import build

from draftree.drafting import Context, Lookahead
from draftree.engine import Engine, Rules, generate
from draftree.runner import open_runner
from draftree.runner import step_cost as cost_module
from draftree.runner.step_cost import StepCost, cached_cost, measure_cost
from draftree.shaping import DynamicTree, Fixed
from draftree.shaping.calibration import Calibration
from draftree.shaping.cost_line import CostLine
from draftree.tree import TokenTree

FLAT = StepCost((1, 64), (1.0, 1.001))
STEEP = StepCost((1, 2, 64), (1.0, 2.0, 64.0))  # a row costs what a token brings: nothing can pay


def context(number: int, tokens: list[int], prompt: int = 3) -> Context:
    return Context(number, tokens, prompt, 1000)


# ------------------------------------------------------------------------------- the choice

probability = st.sampled_from([0.9, 0.6, 0.6, 0.3, 0.3, 0.05, 0.0])
steps = st.lists(st.floats(0.0, 0.5), min_size=12, max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(probability, min_size=5, max_size=5), min_size=1, max_size=2), steps)
def test_the_choice_is_the_best_of_all(guesses: list[list[float]], rises: list[float]) -> None:
    """Against brute force over every allotment of guesses to requests; probabilities repeat, costs have steps."""
    cost = StepCost(range(1, 14), 1 + np.concatenate([[0.0], np.cumsum(rises)]))
    worth = np.array([[0.0, *row] for row in guesses])
    batch = len(worth)
    chosen = DynamicTree(cost=cost).choose(worth)

    def rate(sizes: tuple[int, ...]) -> float:
        gain = sum(np.sort(row)[::-1][:n].sum() for row, n in zip(worth, sizes, strict=True))
        return float((batch + gain) / cost.of(batch + sum(sizes)))

    best = max(rate(sizes) for sizes in itertools.product(range(6), repeat=batch))
    assert rate(tuple(chosen)) == pytest.approx(best, rel=1e-9)


def test_a_batch_shares_rows_by_worth() -> None:
    worth = np.array([[0, 0.9, 0.8, 0.7, 0.6], [0, 0.1, 0.05, 0.01, 0.01], [0, 0.75, 0.2, 0.1, 0]])
    cost = StepCost((3, 8, 9), (1.0, 1.1, 9.0))
    assert DynamicTree(cost=cost).choose(worth) == [4, 0, 1]


@pytest.mark.parametrize("acceptance", ["by-rank", "product"])
@pytest.mark.parametrize("cost", ["line", "measured"])
def test_the_papers_models_size_trees_too(acceptance: str, cost: str) -> None:
    """Against the same text, with what they learned kept from one engine to the next."""
    truth = answer(60)
    shape = DynamicTree(cost=cost, acceptance=acceptance)
    drafter = RandomTree({tuple(PROMPTS[0]): truth}, seed=1)
    requests = [run(drafter, shape, 60) for _ in range(3)]
    assert all(request.tokens == truth for request in requests)
    assert max(request.stats.drafted for request in requests) > 0
    assert isinstance(shape.planner.known, CostLine) == (cost == "line")
    held = shape.planner.known
    shape.bind(FLAT)
    assert (shape.planner.known is held) == (cost == "line")


@pytest.mark.parametrize("options", [{"cost": "cheap"}, {"acceptance": "sure"}, {"max_nodes": 0}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DynamicTree(**options)


def test_equals_do_not_come_all_at_once() -> None:
    worth = np.array([[0.0] + [0.5] * 20])
    cost = StepCost((1, 8, 9, 21), (1.0, 1.01, 9.0, 9.1))
    assert DynamicTree(cost=cost).choose(worth) == [7]


def test_no_more_than_max_nodes() -> None:
    assert DynamicTree(3, cost=FLAT).choose(np.array([[0.0] + [0.9] * 20])) == [3]
    assert DynamicTree(3, cost=FLAT).budgets([context(0, [1])], 64) == [3]
    assert Fixed(5).budgets([context(0, [1])] * 2, 4) == [4, 4]


def test_trees_stay_connected() -> None:
    shape = DynamicTree(cost=StepCost((1, 4, 5, 64), (1.0, 1.01, 3.0, 64.0)))
    tree = TokenTree.from_paths(5, [[6, 7, 8], [9, 10], [11]], [[-0.1, -0.1, -0.1], [-1.0, -0.1], [-3.0]])
    trimmed = shape.trim([context(0, [1, 2, 5])], tree)
    assert trimmed.sizes == (4,)
    assert trimmed.tokens[0].tolist() == [5, 6, 7, 8]


# ------------------------------------------------------------------------------- calibration


def feed(calibration: Calibration, rate: float, claimed: float, count: int, seed: int) -> None:
    """Trees of one guess with probability `claimed`, right at `rate`."""
    rng = np.random.default_rng(seed)
    for n in range(count):
        request = context(n, [3, 4, 5])
        tree = TokenTree.from_arrays([7], [-1], np.array([np.log(claimed)], dtype=np.float32), root=5)
        calibration.remember([request], tree)
        request.tokens.append(7 if rng.random() < rate else 8)
        calibration.compare([request])
        calibration.forget(request)


@pytest.mark.parametrize(("claimed", "rate"), [(0.95, 0.4), (0.95, 0.9), (0.5, 0.1), (0.02, 0.01)])
def test_calibration_finds_the_rate(claimed: float, rate: float) -> None:
    calibration = Calibration()
    tree = TokenTree.from_arrays([7], [-1], np.array([np.log(claimed)], dtype=np.float32), root=5)
    before = abs(calibration.worth(tree)[0, 1] - rate)
    feed(calibration, rate, claimed, 600, seed=1)
    found = float(calibration.worth(tree)[0, 1])
    assert abs(found - rate) < 0.1
    assert abs(found - rate) < max(before, 0.05)
    assert (np.diff(calibration.rates) <= 1e-12).all()


def test_calibration_judges_whole_paths() -> None:
    """A guess is right only where all above it are; padding of other rows is no guess; depth waits for its text."""
    calibration = Calibration()
    start = calibration._counts.right.sum(), calibration._counts.seen.sum()
    trees = TokenTree.stack(
        [
            TokenTree.from_paths(5, [[6, 7, 8], [9, 7]], [[-0.1] * 3, [-2.0, -0.1]]),
            TokenTree.from_paths(5, [[0]], [[-0.1]]),
        ]
    )
    requests = [context(0, [1, 5]), context(1, [1, 5])]
    calibration.remember(requests, trees)
    requests[0].tokens += [6, 7]
    calibration.compare(requests)
    assert calibration._counts.seen.sum() == start[1]  # the third guess's text has not come yet
    requests[0].tokens += [9]
    calibration.compare(requests)
    touched = calibration._counts.seen != Calibration()._counts.seen
    assert touched.sum() >= 2
    fresh = Calibration()
    right = calibration._counts.right - np.where(touched, 0.99, 1.0) * fresh._counts.right
    assert right.sum() == pytest.approx(2)  # 6, 7; not 8, and not the 7 below a wrong 9
    requests[1].tokens += [0]  # id 0 is a token like any other
    calibration.compare(requests)
    assert calibration._counts.right.sum() > start[0]
    calibration.forget(requests[0])
    calibration.forget(requests[1])
    assert not calibration._drafted


def test_trees_that_were_right_to_the_end_are_learned_from() -> None:
    """As far as the text went; nodes beyond its end, and trees that nothing came behind, teach nothing."""
    calibration = Calibration()
    start = calibration._counts.seen.sum(), calibration._counts.right.sum()
    request = context(0, [1, 5])
    tree = TokenTree.from_paths(5, [[9, 7], [6, 7, 8]], [[-2.0, -0.1], [-0.1, -0.1, -0.1]])
    calibration.remember([request], tree)
    request.tokens += [6]
    assert calibration.compare([request]) == set()
    calibration.remember([request], tree)
    calibration.forget(request)
    kept = 0.99 * start[0] + 2  # of one bin or two, whose past fades
    assert start[0] + 2 > calibration._counts.seen.sum() > kept
    fresh = Calibration()
    touched = calibration._counts.seen != fresh._counts.seen
    assert (calibration._counts.right - np.where(touched, 0.99, 1.0) * fresh._counts.right).sum() == pytest.approx(1)


# ------------------------------------------------------------------------------- in the engine

PROMPTS = prompts((12, 12), seed=4)


def run(drafter: RandomTree, shape: DynamicTree, new: int, **options: object) -> object:
    engine = Engine(build("llama"), drafter=drafter, shape=shape, slots=1, **options)
    request = engine.add(PROMPTS[0], Rules(max_new_tokens=new))
    engine.run()
    return request


class Counting(RandomTree):
    """Counts how often it is asked."""

    asked = 0

    def draft(self, requests: object, budgets: object) -> TokenTree:
        self.asked += 1
        return super().draft(requests, budgets)  # type: ignore[arg-type]


def answer(new: int) -> list[int]:
    engine = Engine(build("llama"))
    request = engine.add(PROMPTS[0], Rules(max_new_tokens=new))
    engine.run()
    return request.tokens


def test_nothing_accepted_leads_to_roots_alone_and_rare_questions() -> None:
    drafter = Counting({}, seed=1)  # knows nothing: random guesses among 97
    shape = DynamicTree(cost=StepCost((1, 2, 64), (1.0, 1.2, 10.0)))
    request = run(drafter, shape, 200, reject_drafts=True)
    assert request.stats.accepted == 0
    assert request.stats.steps == 200
    assert drafter.asked < 130  # to ask costs nothing here, and there are seldom guesses
    assert request.stats.drafted < 60
    drafter.asked = 0
    again = run(drafter, shape, 200, reject_drafts=True)
    assert drafter.asked < 130
    assert again.stats.drafted < 60


def test_a_drafter_that_gets_better_is_noticed() -> None:
    truth = answer(230)
    shape = DynamicTree(cost=StepCost((1, 2, 64), (1.0, 1.05, 4.0)))
    useless, good = Counting({}, seed=1), Counting({tuple(PROMPTS[0]): truth}, seed=1)
    run(useless, shape, 230)
    request = run(good, shape, 230)
    assert request.tokens == truth
    assert request.stats.accepted > 60


def test_nothing_pays_where_rows_cost_as_much_as_tokens() -> None:
    drafter = RandomTree({tuple(PROMPTS[0]): answer(40)}, seed=1)
    request = run(drafter, DynamicTree(cost=STEEP), 40)
    assert request.stats.drafted == 0
    cheap = run(drafter, DynamicTree(cost=FLAT), 40)
    assert cheap.stats.accepted > 10


def test_the_default_shape_belongs_to_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    drafter = Lookahead()
    ids = torch.tensor(PROMPTS[:1])
    generate(build("llama"), ids, drafter=drafter, max_new_tokens=8)
    learned = drafter.shape
    assert isinstance(learned, DynamicTree)
    generate(build("llama"), ids, drafter=drafter, max_new_tokens=8)
    assert drafter.shape is learned
    generate(build("llama"), ids, drafter=drafter, shape=Fixed(2), max_new_tokens=8)
    assert drafter.shape is learned


# ------------------------------------------------------------------------------- what a step costs


def test_between_and_beyond_measured_points() -> None:
    cost = StepCost((1, 4, 8), (1.0, 4.0, 6.0))
    assert cost.of([1, 2, 4, 6, 8, 12]).tolist() == [1, 2, 4, 5, 6, 8]
    assert StepCost((1, 2, 4), (2.0, 1.0, 3.0)).of([1, 2, 4]).tolist() == [2, 2, 3]


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((1,), (1.0,)), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 2), (1.0, float("nan"))), ((1, 2), (0.0, 1.0))],
)
def test_what_is_no_curve(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="step-cost curve needs"):
        StepCost(rows, seconds)


def test_real_steps_bend_the_curve() -> None:
    cost = StepCost((1, 8, 64), (1.0, 2.0, 10.0))
    for _ in range(400):
        cost.observe(8, 4.0)
    near, far = cost.of(8) / 2.0, cost.of(64) / 10.0
    assert near == pytest.approx(2.0, rel=0.05)
    assert 1.0 < far < near
    before = cost.of(8)
    cost.observe(8, 4000.0)  # one stall
    assert cost.of(8) < 1.1 * before


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_measured_curves(name: str) -> None:
    cost = measure_cost(open_runner(build(name)), seconds=0.02)
    assert cost.rows[0] == 1
    assert (cost.seconds > 0).all()
    assert (np.diff(cost.of(range(1, 100))) >= 0).all()


def test_short_contexts_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo import MEMBERS, construct

    model = construct(MEMBERS["gpt2"], n_positions=40)
    cost = measure_cost(open_runner(model), seconds=0.0)
    assert cost.rows.tolist() == [1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32]
    monkeypatch.setattr(cost_module, "PATIENCE", 0.0)
    assert measure_cost(open_runner(model), seconds=0.0).rows.tolist() == [1, 2, 3]  # slow models are not kept waiting


def test_long_contexts_have_curves_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(cost_module, "measure_cost", lambda runner, context: asked.append(context) or FLAT)
    runner = open_runner(build("llama"))
    monkeypatch.setattr(runner, "costs", {})
    for context in (40, 300, 1024, 3000, 9000):
        cached_cost(runner, context)
    assert asked == [128, 1024, 4096]
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(runner, "costs", {})
