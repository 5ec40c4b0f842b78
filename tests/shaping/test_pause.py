"""Ways of drafting pause where they lose, longer each time, and come back where they win."""

from __future__ import annotations

import numpy as np
import pytest

from draftree.shaping.planner import PAUSE_FIRST, PAUSE_LAST, PLAIN, PREPARED, UNPREPARED, PausePolicy


def run(policy: PausePolicy, advantage: dict[int, float], steps: int) -> list[int]:
    """The ways of so many steps, each at its advantage."""
    ways = []
    for _ in range(steps):
        way = policy.next()
        ways.append(way)
        if way != PLAIN:
            policy.record(way, advantage[way])
    return ways


def pauses(ways: list[int]) -> list[int]:
    """Lengths of the runs of plain steps."""
    text = "".join("." if way == PLAIN else "x" for way in ways)
    return [len(part) for part in text.split("x") if part]


def test_a_loser_pauses_longer_and_longer() -> None:
    ways = run(PausePolicy((UNPREPARED,)), {UNPREPARED: -0.3}, 400)
    found = pauses(ways)
    assert found[:5] == [8, 16, 32, 64, 64]
    assert found[0] == PAUSE_FIRST
    assert max(found) == PAUSE_LAST
    lost = 0.3 * sum(way != PLAIN for way in ways)
    assert lost < 4 + 0.02 * 400  # a few tokens to find out, then one in fifty


def test_what_costs_little_is_given_time() -> None:
    """A trie that finds nothing costs a hundredth of a step: it may look for long before it has lost a token."""
    ways = run(PausePolicy((UNPREPARED,)), {UNPREPARED: -0.01}, 90)
    assert PLAIN not in ways


def test_a_few_bad_steps_in_a_row_are_luck_where_steps_differ_much() -> None:
    """One step in five brings four tokens, the others lose half of one: a gain all the same."""
    policy = PausePolicy((UNPREPARED,))
    luck = np.random.default_rng(0).random(600) < 0.2
    plain = 0
    for lucky in luck:
        way = policy.next()
        plain += way == PLAIN
        if way != PLAIN:
            policy.record(way, 4.0 if lucky else -0.5)
    assert plain < 60


def test_a_winner_never_pauses_and_a_few_bad_steps_are_forgiven() -> None:
    policy = PausePolicy((PREPARED,))
    assert PLAIN not in run(policy, {PREPARED: 0.2}, 100)
    assert PLAIN not in run(policy, {PREPARED: -0.3}, 5)
    assert PLAIN in run(policy, {PREPARED: -0.3}, 60)
    run(policy, {PREPARED: 1.0}, 200)
    ways = run(policy, {PREPARED: -0.5}, 120)
    assert pauses(ways)[0] == PAUSE_FIRST  # what was won made the pauses short again


@pytest.mark.parametrize(("better", "worse"), [(PREPARED, UNPREPARED), (UNPREPARED, PREPARED)])
def test_of_two_ways_the_better_one_is_kept(better: int, worse: int) -> None:
    """Both win against plain steps; the lesser one is tried at the beginning, and rarely again."""
    ways = run(PausePolicy((UNPREPARED, PREPARED)), {better: 0.6, worse: 0.2}, 300)
    assert PLAIN not in ways
    assert set(ways) == {better, worse}
    assert ways.count(worse) < 30
    changed = PausePolicy((UNPREPARED, PREPARED))
    run(changed, {better: 0.6, worse: 0.2}, 300)
    ways = run(changed, {better: -0.5, worse: 0.2}, 300)
    assert ways[100:].count(worse) > 180


def test_one_unlucky_step_does_not_rule_out_a_way() -> None:
    """The better way lost its first step by chance; nothing but more steps can show that."""
    policy = PausePolicy((UNPREPARED, PREPARED))
    ways, lost = [], False
    for _ in range(100):
        way = policy.next()
        ways.append(way)
        advantage = {PLAIN: 0.0, UNPREPARED: 0.5, PREPARED: 1.0 if lost else -0.9}[way]
        lost = lost or way == PREPARED
        if way != PLAIN:
            policy.record(way, advantage)
    assert ways[50:].count(PREPARED) == 50
