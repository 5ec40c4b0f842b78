"""Numbers of requests in recorded passes, which are rounded up as well, and the slots that they stand in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from runner_driver import Run, Tree, difference, one_thread  # noqa: F401
from tape import passes, record_on
from zoo import build

from draftree.runner import CudaGraphRunner, EagerRunner, inspect_model
from draftree.runner.cuda_graphs.frames import MOST_IN_ALL, MOST_KERNEL_ROWS, batch_of


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch)


def test_numbers_of_requests_that_have_recordings() -> None:
    assert sorted({batch_of(n, 16) for n in range(1, 65)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(n <= batch_of(n, 64) < max(n + 1, 1.5 * n) for n in range(1, 300))
    assert [batch_of(n, 128) for n in range(1, 10)] == list(range(1, 10))  # padding a prompt costs as much as one
    for rows, most in itertools.product((1, 2, 4, 8, 16, 32, 64), (MOST_KERNEL_ROWS, MOST_IN_ALL)):
        assert all(batch_of(n, rows) * rows <= most for n in range(1, most // rows + 1))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_requests_that_pad_a_batch_are_seen_by_nobody(name: str, first: int) -> None:
    """Batches of one to nine with fewer recordings, and other slots and all contexts as they were to the bit."""
    lengths = (21, 35, 9, 17, 30, 12, 26, 40, 19)
    target = inspect_model(build(name))
    captured = CudaGraphRunner(target)
    runs = [Run(runner, lengths, first=first).prefill() for runner in (EagerRunner(target), captured)]
    prompts = passes(captured).recorded
    for batch in range(1, 10):
        trees = [Tree.random(6 + b % 3, 20 * batch + b) for b in range(batch)]
        before = [held.clone() for held in stores(runs[1])]
        expected, found = (run.step(trees).logits for run in runs)
        for b, tree in enumerate(trees):
            assert difference(found[b, : tree.size], expected[b, : tree.size]) < 2e-5
        for old, new in zip(before, stores(runs[1]), strict=True):
            for slot, length in enumerate(runs[1].cache.lengths):
                assert torch.equal(old[slot, :, :length], new[slot, :, :length])
                assert torch.equal(old[slot], new[slot]) or first <= slot < first + batch
    assert passes(captured).recorded - prompts == len((1, 2, 3, 4, 6, 8, 12))


def stores(run: Run) -> list[Any]:
    return [held for held in (*run.cache._keys, *run.cache._values) if held is not None]


def test_rows_and_states_of_a_padded_batch() -> None:
    """What enters and leaves in mid-stack has the requests that there are."""
    target = inspect_model(build("llama"))
    runs = [Run(runner, (9, 21, 14, 30, 17)).prefill() for runner in (EagerRunner(target), CudaGraphRunner(target))]
    trees = [Tree.random(5, b) for b in range(5)]
    expected, found = (run.step(trees, taps=(0, 1, 4)) for run in runs)
    for layer, states in expected.hidden.items():
        assert difference(found.hidden[layer], states) < 2e-5
    ahead = [run.plan(trees) for run in runs]
    for plan in ahead:
        plan.embeddings = target.model.get_input_embeddings()(plan.tokens[:, -2:]).detach()
        plan.tokens = plan.tokens.clone()
        plan.tokens[:, -2:] = 0
    plain = [run.step(trees).logits for run in runs]
    given = [run.runner.run(plan, run.cache, 0).logits for run, plan in zip(runs, ahead, strict=True)]
    assert difference(given[1], plain[0]) < 2e-5
    assert difference(given[0], plain[0]) < 2e-5


def test_a_batch_is_padded_in_the_narrowest_cache() -> None:
    """Room is made for what pads, also where all contexts are as long."""
    target = inspect_model(build("llama"))
    runners = EagerRunner(target), CudaGraphRunner(target)
    runs = [Run(runner, (180,) * 5, capacity=256).prefill() for runner in runners]
    trees = [Tree.random(56, b) for b in range(5)]
    expected, found = (run.step(trees).logits for run in runs)
    assert difference(found, expected) < 2e-5
    assert runs[1].cache.capacity >= 180 + 2 * 64
