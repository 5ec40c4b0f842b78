"""Numbers of requests in recorded passes, which are rounded up, and their slots."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from runner_driver import Run, Tree, difference, one_thread, prune  # noqa: F401
from tape import passes, record_on
from zoo import build

from draftree.runner import CudaGraphRunner, EagerRunner, inspect_model
from draftree.runner.cuda_graphs.frames import MOST_IN_ALL, MOST_KERNEL_ROWS, Buffers, Capture, Frame, batch_of
from draftree.runner.eager.runner import Attention
from draftree.runner.plan import Surgery


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch)


def test_numbers_of_requests_that_have_recordings() -> None:
    assert sorted({batch_of(n, 1) for n in range(1, 65)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert sorted({batch_of(n, 64) for n in range(1, 10)}) == [1, 2, 3, 4, 6, 8, 9]  # 12 would be 192 rows more
    assert [batch_of(n, 128) for n in range(1, 10)] == list(range(1, 10))
    for rows, most in itertools.product((1, 2, 4, 8, 16, 32, 64), (MOST_KERNEL_ROWS, MOST_IN_ALL)):
        assert all(n <= batch_of(n, rows) <= most // rows for n in range(1, most // rows + 1))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_padding_of_a_batch_changes_nothing(name: str, first: int) -> None:
    """Run batches of one to nine: the same logits, and no bit of a context or another slot changed."""
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
                changed = (old[slot] != new[slot]).any(-1).any(0).nonzero()[:, 0].tolist()
                if not first <= slot < first + batch:
                    assert changed == []
                else:  # rows of a bucket, and what pads the batch behind the shortest of these contexts
                    padded = batch_of(batch, 8) > batch and length == min(runs[1].cache.lengths[first : first + batch])
                    assert set(changed) <= set(range(length, length + 8 * (1 + padded)))
    assert passes(captured).recorded - prompts == len((1, 2, 3, 4, 6, 8, 12))


def stores(run: Run) -> list[Any]:
    return [held for held in (*run.cache.keys, *run.cache.values) if held is not None]


@pytest.mark.parametrize("lengths", [(190, 20, 20, 20, 20), (180,) * 5])
def test_no_cache_grows_for_padding(lengths: tuple[int, ...]) -> None:
    """Padding goes behind the shortest context. A batch is not padded where that would make the cache grow."""
    target = inspect_model(build("llama"))
    runners = EagerRunner(target), CudaGraphRunner(target)
    runs = [Run(runner, lengths, capacity=256).prefill() for runner in runners]
    trees = [Tree.random(56, b) for b in range(5)]
    expected, found = (run.step(trees).logits for run in runs)
    assert difference(found, expected) < 2e-5
    assert runs[1].cache.capacity == 256
    (frame,) = (frame for frame in runs[1].cache.recordings if frame.batch > 1)
    assert frame.batch == (6 if min(lengths) < 100 else 5)


def test_inputs_begin_where_kernels_expect_them() -> None:
    """Begin inputs at multiples of 16 bytes, as Triton compiles another kernel for other addresses."""
    for batch, rows in itertools.product((1, 2, 3, 6), (1, 2, 64)):
        frame = Frame(batch, rows, 256, rows, 0, (0, 4), (), injects=False, heads=1, row_by_row=False)
        packed, inputs, *_ = Buffers(Capture(), torch.device("cpu")).packed(frame)
        for held in (inputs.slots, inputs.starts, inputs.begins, inputs.ids):
            assert (held.data_ptr() - packed.data_ptr()) % 16 == 0


def test_keys_and_values_of_leading_slots_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    target = inspect_model(build("llama"))
    runner = CudaGraphRunner(target)
    seen: list[Any] = []
    right = Attention.__call__
    monkeypatch.setattr(Attention, "__call__", lambda self, *given: seen.append(given[1]) or right(self, *given))
    run = Run(runner, (9, 21, 14, 30, 17)).prefill()
    for first, batch, lies in ((0, 2, True), (0, 5, False), (3, 2, False)):  # five are six, and there are five slots
        seen.clear()
        runner.run(run.plan([Tree.random(5, b) for b in range(batch)]), run.cache, first)
        held = {store.untyped_storage().data_ptr() for store in stores(run)}
        assert {keys.untyped_storage().data_ptr() in held for keys in seen} == {lies}


JOINS = torch.zeros(5, 3, 16, dtype=torch.bool)
JOINS[:, :, 0] = True
JOINS[:, :, 13:] = torch.eye(3, dtype=torch.bool)
KEPT = torch.tensor([[0, 1, 3, 5], [0, 2, 4, -1], [0, 1, 2, 3], [0, -1, -1, -1], [0, 1, -1, -1]])
JOINING = Surgery(2, append=lambda x: 2 * x[:, :3], positions=torch.full((5, 3), 60), visible=JOINS)


@pytest.mark.parametrize(
    "options",
    [{"surgeries": (JOINING,), "taps": (2, 4)}, {"surgeries": prune(2, KEPT), "taps": (1, 2, 3)}],
    ids=["joined", "pruned"],
)
def test_rows_that_join_or_leave_in_a_padded_batch(options: dict[str, Any]) -> None:
    target, found = inspect_model(build("llama")), []
    trees = [Tree.random(13, b) for b in range(5)]
    for runner in (EagerRunner(target), CudaGraphRunner(target)):
        run = Run(runner, (21, 30, 9, 17, 12)).prefill()
        step = run.step(trees, **options)
        left = range(13) if step.rows is None else None
        rows = [list(left) if left is not None else [r for r in KEPT[b].tolist() if r >= 0][:2] for b in range(5)]
        run.cache.commit([[row for row in of_one if row in tree.branches[-1]] or [0] for of_one, tree in
                          zip(rows, trees, strict=True)], step.segments)  # fmt: skip
        found.append((step, run.step(trees)))
    for ours, expected in zip(found[1], found[0], strict=True):
        assert difference(ours.logits, expected.logits) < 2e-5
        for layer, states in expected.hidden.items():
            assert difference(ours.hidden[layer], states) < 2e-5
