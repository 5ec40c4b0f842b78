"""Threads go to rest when passes on several of them are held up, and are tried again; results know nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import zoo

from draftree.runner import EagerRunner, inspect_model
from draftree.runner.cpu.threads import LONGEST_REST, PER_MULTIPLICATION, PER_PASS, REST, Pace, Pauses
from draftree.runner.plan import Plan

WORK, WORTH = 3_000_000, 1_000_000
ALONE = 0.001  # seconds that one thread takes


class Clock:
    """Stands still until it is told of some seconds."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Machine:
    """Passes of given times on two threads and on one."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pace = Pace(Pauses(self.clock))

    def threads(self, work: int = WORK) -> int:
        return self.pace.threads(work, WORTH)

    def passes(self, threads: int, seconds: float, work: int = WORK) -> None:
        began = self.pace.clock()
        self.clock.seconds += seconds
        self.pace.took(work, threads, began)

    def rest(self) -> float:
        """Seconds until several threads are chosen, by passes of one; to the length of such a pass."""
        began = self.clock.seconds
        while self.threads() == 1:
            self.passes(1, ALONE)
        return self.clock.seconds - began


@pytest.fixture
def machine() -> Iterator[Machine]:
    torch.set_num_threads(2)
    yield Machine()
    torch.set_num_threads(1)


def test_passes_worth_it_get_all_threads(machine: Machine) -> None:
    assert machine.threads(WORTH) == 1
    assert machine.threads(WORTH + 1) == 2
    torch.set_num_threads(1)
    assert machine.threads() == 1


def test_a_stall_is_followed_by_a_rest_of_a_few_times_its_length(machine: Machine) -> None:
    machine.passes(1, ALONE)
    machine.passes(2, ALONE / 2)
    machine.passes(2, 1.9 * ALONE)  # within what may be
    assert machine.threads() == 2
    machine.passes(2, 0.05 + ALONE)
    assert machine.threads() == 1
    assert machine.rest() == pytest.approx(REST * 0.05, abs=2 * ALONE)
    assert machine.threads() == 2


def test_rests_double_while_it_stays_bad_and_begin_anew_behind_better_times(machine: Machine) -> None:
    rests = []
    for _ in range(8):
        machine.passes(2, 0.05)
        rests.append(machine.rest())
        for _ in range(5):
            machine.passes(2, ALONE / 2)
    for earlier, later in pairwise(rests):
        assert later == pytest.approx(min(2 * earlier, LONGEST_REST), rel=0.05)
    assert rests[-1] == pytest.approx(LONGEST_REST, rel=0.05)
    machine.clock.seconds += LONGEST_REST
    machine.passes(2, 0.05)
    assert machine.rest() == pytest.approx(rests[0], rel=0.05)


def test_stalls_cost_a_small_part_of_all_time(machine: Machine) -> None:
    """Two threads that are held up whenever they are tried, for a minute: a tenth of a second each time."""
    begin = machine.clock.seconds
    lost = 0.0
    while machine.clock.seconds < begin + 60:
        machine.rest()
        machine.passes(2, 0.1)
        lost += 0.1
    assert lost < 0.04 * 60


def test_before_one_thread_was_timed_a_generous_guess_stands_for_it(machine: Machine) -> None:
    guess = PER_PASS + PER_MULTIPLICATION * WORK
    machine.passes(2, 1.9 * guess)
    assert machine.threads() == 2
    machine.passes(2, 2.1 * guess)
    assert machine.threads() == 1


def test_what_one_thread_takes_is_found_out_anew_in_every_rest(machine: Machine) -> None:
    """Behind a longer context all passes take longer, which no stall is."""
    machine.passes(1, ALONE)
    machine.passes(2, 5 * ALONE)
    while machine.threads() == 1:
        machine.passes(1, 8 * ALONE)
    machine.passes(2, 5 * ALONE)
    assert machine.threads() == 2


def test_a_pass_that_outlasts_the_rest_is_not_put_on_one_thread(machine: Machine) -> None:
    machine.passes(2, 0.5)
    long = 100_000_000_000
    assert PER_MULTIPLICATION * long > LONGEST_REST
    assert (machine.threads(), machine.threads(long)) == (1, 2)


def test_all_models_of_a_process_rest_together(machine: Machine) -> None:
    other = Pace(machine.pace._pauses)
    machine.passes(2, 0.1)
    assert other.threads(WORK, WORTH) == 1


def test_passes_of_a_model_rest_and_give_the_same(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr("draftree.runner.cpu.threads.PAUSES", machine.pace._pauses)
    monkeypatch.setattr("draftree.runner.cpu.layers.WORTH_THREADS", 0)
    runner = EagerRunner(inspect_model(zoo.build("llama")))  # one that learns nothing from the clocks of other tests
    if runner._compiled is None:
        pytest.skip("the layers are not compiled here")
    stack = runner._compiled
    chosen: list[int] = []
    stalls = iter((0.0, 1.0, 0.0, 0.0, 0.0))
    run = stack._run

    def timed(layers: object, count: int, of_pass: object, *rest: object) -> None:
        chosen.append(of_pass.threads)  # type: ignore[attr-defined]
        run(layers, count, of_pass, *rest)
        machine.clock.seconds += next(stalls)

    whole = runner._whole.compiled
    assert whole is not None
    monkeypatch.setattr(whole, "_run", timed)
    tokens = torch.arange(12)[None]
    visible = torch.ones(1, 12, 12, dtype=torch.bool).tril()
    plan = Plan(tokens, torch.arange(12)[None], visible, first_logit_row=3)  # not in one call
    logits = []
    for _ in range(4):
        logits.append(runner.run(plan, runner.new_cache(1)).logits)
    machine.clock.seconds += LONGEST_REST
    logits.append(runner.run(plan, runner.new_cache(1)).logits)
    assert chosen == [2, 2, 1, 1, 2]
    assert all(torch.equal(logits[0], later) for later in logits[1:])
