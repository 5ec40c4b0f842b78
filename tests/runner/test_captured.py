"""Recorded passes of fixed shapes against the same layers in tensors: bits, buckets, bands, and memory that moves.

`Tape` takes the place of a CUDA graph: it repeats what it recorded without running Python again.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from few import crossed
from runner_driver import BUSHY, Run, Tree, difference, one_thread, prune  # noqa: F401
from tape import record_on, tape
from zoo import build

from draftree.runner import CudaGraphRunner, EagerRunner, inspect_model, open_runner
from draftree.runner.cuda_graphs.frames import band_of, bucket_of
from draftree.runner.eager import runner as eager_runner
from draftree.runner.plan import Segment, Surgery

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "glm4", "olmo3", "mistral-window", "qwen2-window", "phi3")
CLOSE = 2e-5


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch)


def both(name: str) -> tuple[EagerRunner, CudaGraphRunner]:
    """Return the eager and the recording runner of the model of that name."""
    target = inspect_model(build(name))
    return EagerRunner(target), CudaGraphRunner(target)


def far(trees: list[Tree], ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return max(difference(ours[b, : tree.size], theirs[b, : tree.size]) for b, tree in enumerate(trees))


@pytest.mark.parametrize(("name", "lengths"), crossed(FAMILIES, [(21,), (40, 19, 23)]))
def test_logits_over_all_buckets(name: str, lengths: tuple[int, ...]) -> None:
    """Run trees of sizes at buckets and between them, and commit branches from the middle of trees."""
    tensors, captured = both(name)
    runs = [Run(runner, lengths).prefill() for runner in (tensors, captured)]
    prompts = captured.recorded
    for number, size in enumerate((1, 2, 3, 5, 8, 13, 1, 32, 60, 100, 2, 1)):
        trees = [Tree.random(max(1, size - 3 * b), 7 * number + b) for b in range(len(lengths))]
        expected, found = (run.step(trees) for run in runs)
        assert far(trees, found.logits, expected.logits) < CLOSE, size
        if size == 13:
            assert runs[1].error(trees, found) < 1e-4  # and the stock model's
        for run, result in zip(runs, (expected, found), strict=True):
            run.commit(trees, [tree.branches[-1] for tree in trees], result)
    assert captured.recorded - prompts == 8  # one for each bucket, however often it is used
    assert prompts == len({bucket_of(length) for length in lengths})  # in any slot
    assert tape(captured).replayed == 12 + len(lengths)


def test_the_same_bits_where_shapes_are_the_same() -> None:
    """Fill a bucket that ends with its band, so that every operation has the shape that it has without frames."""
    tensors, captured = both("llama")
    runs = [Run(runner, (256 - 16,), capacity=256).prefill() for runner in (tensors, captured)]
    stores = ([*run.cache.keys, *run.cache.values] for run in runs)
    for of_tensors, of_captured in zip(*stores, strict=True):
        assert of_tensors is not None
        assert of_captured is not None
        of_captured.copy_(of_tensors)  # the prompt was read in another shape
    tree = Tree.random(16, 3)
    expected, found = (run.step([tree]).logits for run in runs)
    assert torch.equal(expected, found)


def test_bands_and_buckets() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 64, 65, 128, 1025)] == [1, 2, 4, 64, 128, 128, None]
    seen = sorted({band_of(n, 1 << 20, exact=False) for n in range(1, 5000)})
    assert seen == [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    assert all(n <= band_of(n, 1 << 20, exact=False) for n in range(1, 5000))
    assert band_of(1100, 1280, exact=False) == 1280  # never more positions than the cache has
    for capacity in (1280, 1536, 4096):  # of many rows, whose sums may depend on it
        assert band_of(1100, capacity, exact=True) == 1280


def test_a_cache_that_grows_drops_its_recordings() -> None:
    tensors, captured = both("llama")
    runs = [Run(runner, (180, 120), capacity=64).prefill() for runner in (tensors, captured)]
    capacities = set()
    for number in range(10):
        trees = [Tree.random(16, 2 * number + b) for b in range(2)]
        expected, found = (run.step(trees) for run in runs)
        assert far(trees, found.logits, expected.logits) < CLOSE, number
        for run, result in zip(runs, (expected, found), strict=True):
            run.commit(trees, [list(range(16))] * 2, result)
        capacities.add(runs[1].cache.capacity)
    assert len(capacities) > 1
    assert len(runs[1].cache.recordings) == 1
    assert captured.recorded == 2 + len(capacities)  # two prompts, and a tree for each


def test_the_least_recently_used_recording_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.runner.cuda_graphs.runner.KEPT", 3)
    _, captured = both("llama")
    run = Run(captured, (19,)).prefill()
    for size in (1, 2, 4, 1, 8):  # 2 is the oldest when 8 comes
        run.step([Tree.random(size, size)])
    assert sorted(frame.rows for frame in run.cache.recordings) == [1, 4, 8]
    run.step([Tree.random(2, 1)])
    assert captured.recorded == 1 + 5  # the prompt, and the trees


def test_stores_and_recordings_serve_the_next_cache() -> None:
    """Recordings of one call of `generate` are replayed in the next, and texts do not depend on earlier ones."""
    _, captured = both("llama")
    trees = [Tree.random(5, 1)]
    first = Run(captured, (40,)).prefill()
    expected = first.step(trees).logits
    stores = {t.data_ptr() for t in first.cache.keys if t is not None}
    first.cache.commit([list(range(5))], [Segment(0, None, torch.zeros(1, 5), torch.zeros(1, 5, 5))])
    other = Run(captured, (30,), seed=9)  # beside it, so on stores of its own
    other.prefill().step(trees)
    assert captured.recorded == 4  # a prompt and a tree for each
    del first
    gc.collect()
    again = Run(captured, (40,)).prefill()
    assert {t.data_ptr() for t in again.cache.keys if t is not None} == stores
    assert torch.equal(again.step(trees).logits, expected)
    assert captured.recorded == 4
    del again, other
    gc.collect()
    assert len(captured._free_stores) == 1
    wide = captured.new_cache(2)  # another number of slots is another memory, and frees what was kept
    assert not any(store is not None for store in wide.keys)
    assert not captured._free_stores
    wide.stores(0, 2, (16, 16), torch.zeros(1))
    del wide
    gc.collect()
    assert not captured._free_stores  # only some layers had stores


def test_buffers_are_shared() -> None:
    """Memory grows with the largest pass, and earlier passes leave no trace in it."""
    _, captured = both("llama")
    run = Run(captured, (19,)).prefill()
    run.step([Tree.random(128, 1)])
    buffers = {name: held.data_ptr() for name, held in captured._buffers._held.items()}
    first = run.step([Tree.random(10, 2)]).logits
    for size in (1, 2, 4, 8, 16, 32, 64):
        run.step([Tree.random(size, size)])
    assert {name: held.data_ptr() for name, held in captured._buffers._held.items()} == buffers
    assert torch.equal(run.step([Tree.random(10, 2)]).logits, first)


# ---------------------------------------------------------------- more than tokens and trees


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_join_leave_or_are_tapped(name: str) -> None:
    tensors, captured = both(name)
    trees = [Tree(BUSHY, 1), Tree.random(9, 2)]
    more = torch.zeros(2, 3, 13 + 3, dtype=torch.bool)
    more[:, :, 0] = True
    more[:, :, 13:] = torch.eye(3, dtype=torch.bool)
    ahead = torch.full((2, 3), 60)
    joining = Surgery(2, append=lambda x: 2 * x[:, :3], positions=ahead, visible=more)
    kept = torch.tensor([[0, 1, 3, 5], [0, 2, 4, -1]])
    plans: dict[str, dict[str, Any]] = {
        "taps": {"taps": (0, 1, 3, 4)},
        "joined": {"surgeries": (joining,), "taps": (2, 4), "last_logit_row": 13},
        "pruned": {"surgeries": prune(2, kept), "taps": (1, 2, 3)},
        "by state": {"surgeries": prune(1, lambda x: x[:, :5].abs().sum(-1).argsort(1).sort(1).values)},
        "twice": {"surgeries": (*prune(1, kept), Surgery(3, keep=torch.tensor([[0, 2], [0, 1]])))},
        "first rows": {"last_logit_row": 2},
        "last rows": {"first_logit_row": 11},
    }
    for kind, options in plans.items():
        runs = [Run(runner, (21, 30)).prefill() for runner in (tensors, captured)]
        expected, found = (run.step(trees, **options) for run in runs)
        assert difference(found.logits, expected.logits) < CLOSE, kind
        assert set(found.hidden) == set(expected.hidden), kind
        for layer, states in expected.hidden.items():
            assert difference(found.hidden[layer], states) < 10 * CLOSE, (kind, layer)
        for theirs, ours in zip(expected.segments, found.segments, strict=True):
            assert theirs.start == ours.start
            assert (theirs.rows is None) == (ours.rows is None)
            assert theirs.rows is None or torch.equal(theirs.rows, ours.rows), kind
        for run, result in zip(runs, (expected, found), strict=True):
            run.commit(trees, [[0], [0]], result)
        one = [Tree((-1,), 5), Tree((-1,), 6)]
        assert difference(runs[1].step(one).logits, runs[0].step(one).logits) < CLOSE, kind
        assert captured.takes(runs[1].plan(trees, **options), runs[1].cache, 0), kind


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_embeddings_and_a_deep_prefix(name: str) -> None:
    tensors, captured = both(name)
    generator = torch.Generator().manual_seed(4)
    heads, dim = tensors._layers[0].parts.heads.kv, tensors._layers[0].parts.heads.dim
    prefix = [tuple(torch.randn(heads, 3, dim, generator=generator) for _ in range(2)) for _ in range(4)]
    extra = torch.randn(2, 3, tensors.target.hidden_size, generator=generator)
    trees = [Tree(BUSHY, 1), Tree(BUSHY, 2)]
    on = torch.zeros(2, 13, dtype=torch.bool)
    on[:, 10:] = True
    results = []
    for runner in (tensors, captured):
        run = Run(runner, (21, 30), prefix=prefix).prefill()
        results.append([run.step(trees, embeddings=extra, prefix_rows=on).logits, run.step(trees).logits])
    for expected, found in zip(*results, strict=True):
        assert difference(found, expected) < CLOSE
    assert difference(results[0][0], results[0][1]) > 0.1


def test_other_shapes_run_in_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    _, captured = both("llama")
    run = Run(captured, (40,)).prefill()
    before = captured.recorded
    tree = [Tree.random(513, 1)]
    assert run.error(tree, run.step(tree)) < 1e-4
    few = [Tree.random(9, 1)]
    monkeypatch.setattr("draftree.runner.cuda_graphs.runner.MOST_IN_ALL", 12)  # 9 rows would be padded to 16
    assert run.error(few, run.step(few)) < 1e-4
    assert captured.recorded == before
    monkeypatch.setattr("draftree.runner.cuda_graphs.frames.MOST_KERNEL_ROWS", 4)  # more are by torch's attention
    monkeypatch.setattr("draftree.runner.cuda_graphs.runner.MOST_EXACT", 47)  # and would end at position 48
    assert run.error([Tree.random(8, 1)], run.step([Tree.random(8, 1)])) < 1e-4
    assert captured.recorded == before
    monkeypatch.setattr("draftree.runner.cuda_graphs.runner.MOST_EXACT", 48)
    run.step([Tree.random(8, 1)])
    assert captured.recorded == before + 1


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_angles_that_depend_on_length_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="depend on a text's length"):
        CudaGraphRunner(inspect_model(build(name)))


# ---------------------------------------------------------------- weights


def test_weights_changed_in_place_are_seen_and_moved_ones_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_runner, "may_copy", lambda *args, **kwargs: False)  # as of a large model
    model = copy.deepcopy(build("llama"))
    runner = open_runner(model, "cuda_graphs")
    run = Run(runner, (21,)).prefill()
    trees = [Tree.random(6, 1)]
    before = run.step(trees).logits
    linear: Any = model.model.layers[1].mlp.down_proj
    assert not runner.outdated
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
    assert runner.outdated
    with torch.no_grad():
        linear.weight.mul_(2.0)
    again = open_runner(model, "cuda_graphs")
    assert again is not runner
    assert difference(Run(again, (21,)).prefill().step(trees).logits, before) > 1e-2
