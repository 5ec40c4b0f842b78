"""Recorded passes against the CPU's, and the law, on a CUDA device where there is one.

Elsewhere a tape takes the place of a CUDA graph (test_captured.py) and a far device for a GPU (test_far_device.py).
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import NEW, SAMPLED, SHAPES, drafters, hf, left_pad, noisy, prompts, references_of, same
from in_model_driver import MAKERS, make
from row_differences import worst_difference
from runner_driver import Run, Tree, difference
from zoo import CAUSAL, build

from draftree.drafting import DraftModel, Lookahead
from draftree.engine import Engine, SamplingParams, generate
from draftree.runner import EagerRunner, HookedRunner, inspect_model, open_runner
from draftree.runner.cuda_graphs.frames import CudaCapture
from draftree.runner.cuda_graphs.runner import CudaGraphRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

NAMES = [member.id for member in CAUSAL]
QUICK = ("llama", "qwen3", "gpt2", "gemma3", "bloom", "mistral-window", "deepseek_v3", "gpt_oss")
CAPTURED = ("llama", "qwen3", "gemma2", "gemma3", "glm4", "olmo3", "mistral-window", "qwen2-window", "phi3")
FIVE = (19, 7, 12, 15, 9)  # lengths of prompts in a batch that is padded
CLOSE = 1e-4  # in float32 a GPU adds in another order than a CPU


@functools.cache
def there(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model of that name on the device; tests do not change it."""
    return copy.deepcopy(build(name)).to("cuda", dtype)


def ids_of(row: list[int]) -> torch.Tensor:
    return torch.tensor([row], device="cuda")


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("lengths", [(21,), (40, 19, 23)], ids=["alone", "ragged"])
def test_logits_over_all_buckets(name: str, lengths: tuple[int, ...]) -> None:
    """Compare recorded and eager passes with the CPU's, and commit branches from the middle of trees."""
    target, far = inspect_model(build(name)), inspect_model(there(name))
    runs = [Run(r, lengths).prefill() for r in (HookedRunner(target), EagerRunner(far), CudaGraphRunner(far))]
    for number, size in enumerate((1, 2, 3, 5, 8, 13, 1, 32, 60, 100, 2, 1)):
        trees = [Tree.random(max(1, size - 3 * b), 7 * number + b) for b in range(len(lengths))]
        expected, *found = (run.step(trees) for run in runs)
        for result in found:
            for b, tree in enumerate(trees):
                ours = result.logits[b, : tree.size].cpu()
                assert difference(ours, expected.logits[b, : tree.size]) < CLOSE, (size, b)
        for run, result in zip(runs, (expected, *found), strict=True):
            run.commit(trees, [tree.branches[-1] for tree in trees], result)
    captured = runs[-1].runner
    assert isinstance(captured, CudaGraphRunner)
    assert captured.recorded == 3 + (len(lengths) > 1)  # buckets that came twice, and prompts of one bucket


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo3"])
def test_other_types_are_near(name: str, dtype: torch.dtype) -> None:
    """Norms and angles in float32 beside states in 16 bits; float64, for which there are no kernels."""
    target, far = inspect_model(build(name)), inspect_model(there(name, dtype))
    runs = [Run(r, (21, 30)).prefill() for r in (HookedRunner(target), CudaGraphRunner(far))]
    trees = [Tree.random(9, 1), Tree.random(5, 2)]
    for _ in range(3):
        expected, found = (run.step(trees).logits for run in runs)
        for b, tree in enumerate(trees):
            off = (found[b, : tree.size].cpu().float() - expected[b, : tree.size]).abs().max()
            assert off < 0.1 * expected.abs().max()


def test_what_cannot_be_recorded_is_done_anew_and_the_next_is_recorded() -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    counter = torch.zeros(1, device="cuda")

    def waits() -> None:
        counter.add_(1)
        counter.item()

    def adds() -> None:
        counter.add_(1)

    for fn in (waits, adds):
        capture.once(fn)
        counter.zero_()
        replay = capture.record(fn)
        before = int(counter)
        replay()
        replay()
        assert int(counter) == before + 2
    assert capture._keeper is not None


def test_a_thread_may_record_what_another_has_begun() -> None:
    runner = CudaGraphRunner(inspect_model(there("llama")))
    run, tree = Run(runner, (40,)).prefill(), [Tree.random(6, 1)]
    found = [run.step(tree).logits]
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(run.step(tree).logits))
        thread.start()
        thread.join()
    assert runner.recorded == 1
    assert len(found) == 3
    assert all(difference(other, found[0]) < CLOSE for other in found)


def test_recordings_go_when_too_many_and_when_stores_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.runner.cuda_graphs.runner.KEPT", 3)
    runner = CudaGraphRunner(inspect_model(there("llama")))
    run, eager = (Run(r, (60,)).prefill() for r in (runner, EagerRunner(inspect_model(there("llama")))))
    for number in range(40):
        trees = [Tree.random(1 + number % 16, number)]
        found, expected = run.step(trees), eager.step(trees)
        assert difference(found.logits, expected.logits) < CLOSE, number
        for one, result in ((run, found), (eager, expected)):
            one.commit(trees, [list(range(trees[0].size))], result)
    assert run.cache.capacity > 300
    assert runner.recorded > 5
    assert 0 < len(run.cache.recordings) <= 3


# ---------------------------------------------------------------- the law


def check_all(name: str, sampled: bool, runner: str, kinds: Callable[[Any], dict[str, Any]]) -> None:
    """Compare every drafter, in a ragged batch, with plain decoding and Hugging Face on the device."""
    rows, model = prompts(), there(name)
    ids, mask = (t.to("cuda") for t in left_pad(rows))
    options: dict[str, Any] = {"max_new_tokens": NEW} | (SAMPLED | {"seed": 11} if sampled else {})
    expected = generate(model, ids, mask, **options).sequences
    if sampled:
        for b, row in enumerate(rows):
            alone = hf(model, ids_of(row), **(options | {"seed": 11 + b}))[0, len(row) :]
            same(expected[b : b + 1, ids.shape[1] : ids.shape[1] + len(alone)], alone[None], f"{name}, row {b} alone")
    else:
        same(expected, hf(model, ids, mask), f"{name} without a drafter")
    accepted = 0
    for number, (kind, maker) in enumerate(kinds(references_of(rows, expected)).items()):
        shape = list(SHAPES)[number % 2]
        drafted = generate(model, ids, mask, drafter=maker(), shape=SHAPES[shape](), runner=runner, **options)
        same(drafted.sequences, expected, f"{name} on {runner} with {kind}, {shape}")
        accepted += drafted.stats.total.accepted
    assert accepted > 0


def kinds_of(references: Any) -> dict[str, Any]:
    more = {"draft-model-there": lambda: DraftModel(there_noisy(), depth=4, branching=3, beam=3, confidence=0)}
    return drafters(references) | more


@functools.cache
def there_noisy() -> Any:
    return copy.deepcopy(noisy("llama")).to("cuda")


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("runner", "name"),
    crossed(("auto", "eager", "hooked"), ("llama", "qwen3", "gemma3", "mistral-window", "phi3", "glm4")),
)
def test_every_drafter_in_a_batch(name: str, runner: str, sampled: bool) -> None:
    check_all(name, sampled, runner, kinds_of)


@pytest.mark.parametrize("kind", [*MAKERS])
@pytest.mark.parametrize("runner", ["auto", "eager", "hooked"])
def test_drafters_inside_the_model(kind: str, runner: str) -> None:
    rows, model = prompts(FIVE), there("llama")
    ids, mask = (t.to("cuda") for t in left_pad(rows))
    expected = generate(model, ids, mask, max_new_tokens=NEW).sequences
    for made_on in (build("llama"), model):  # weights that are on the CPU, and on the device
        drafter = make(kind, made_on)
        out = generate(model, ids, mask, drafter=drafter, runner=runner, max_new_tokens=NEW)
        same(out.sequences, expected, kind)


# ---------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["lookahead", "random", "draft-model"])
def test_strict_in_sixteen_bits(dtype: torch.dtype, kind: str) -> None:
    rows, model = prompts(FIVE), there("llama", dtype)
    ids, mask = (t.to("cuda") for t in left_pad(rows))
    texts = [generate(model, ids_of(row), strict=True, max_new_tokens=NEW).sequences[0] for row in rows]
    alone = [text[len(row) :] for row, text in zip(rows, texts, strict=True)]
    width = ids.shape[1]
    references = {tuple(row): answer.tolist() for row, answer in zip(rows, alone, strict=True)}
    made = drafters(references)[kind]
    out = generate(model, ids, mask, drafter=made(), strict=True, max_new_tokens=NEW)
    for b, answer in enumerate(alone):
        same(out.sequences[b : b + 1, width : width + len(answer)], answer[None], kind)
    assert out.stats.total.accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", CAPTURED)
def test_rows_of_recorded_passes_do_not_depend_on_each_other(name: str, dtype: torch.dtype) -> None:
    runner = open_runner(there(name, dtype))
    assert isinstance(runner, CudaGraphRunner)
    assert runner.independent_rows == (name != "gemma2")  # whose capped scores are multiplied by torch
    assert not runner.independent_rows or worst_difference(runner) == 0


# ---------------------------------------------------------------- what engines meet


def test_requests_that_come_and_go() -> None:
    """Add requests in the middle and long prompts: every answer is that of its prompt alone."""
    model = there("llama")
    rows = prompts((19, 150, 7, 12, 90, 33, 5, 61), seed=8)
    expected = [generate(model, ids_of(row), max_new_tokens=NEW).sequences[0, len(row) :].tolist() for row in rows]
    references = {tuple(row): answer for row, answer in zip(rows, expected, strict=True)}
    for kind in ("random", "lookahead", "in-model"):
        engine = Engine(model, drafter=drafters(references)[kind](), slots=6)
        requests = []
        for row in rows:
            requests.append(engine.add(row, SamplingParams(max_new_tokens=NEW, eos_token_ids=(2,))))
            engine.step()
            engine.step()
        engine.run()
        for request, answer in zip(requests, expected, strict=True):
            assert request.error is None
            assert request.tokens == answer, kind


def test_two_engines_in_two_threads() -> None:
    """One records while the other replays."""
    models = [copy.deepcopy(build(name)).to("cuda") for name in ("llama", "qwen3")]
    rows = prompts((19, 40, 7, 12), seed=2)
    alone = [
        [generate(m, ids_of(row), max_new_tokens=NEW).sequences.tolist() for row in rows]
        for m in (there("llama"), there("qwen3"))
    ]
    found: list[Any] = [None, None]

    def answer(number: int) -> None:
        drafter = Lookahead()
        found[number] = [
            generate(models[number], ids_of(row), drafter=drafter, max_new_tokens=NEW).sequences.tolist()
            for row in rows
        ]

    threads = [threading.Thread(target=partial(answer, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_weights_that_change_and_models_that_move() -> None:
    model = copy.deepcopy(build("llama")).to("cuda")
    ids = torch.tensor(prompts((12,)), device="cuda")

    def check() -> list[int]:
        where = ids.to(model.device)
        expected = hf(model, where)
        same(generate(model, where, drafter=Lookahead(), max_new_tokens=NEW).sequences, expected)
        answer: list[int] = expected[0].tolist()
        return answer

    first = check()
    linear = model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        linear.weight.mul_(3.0)
    second = check()
    linear.weight = torch.nn.Parameter(linear.weight.detach() / 3)
    assert check() == first != second
    linear.weight.data = linear.weight.data * 3
    assert check() == second
    model.to("cpu")
    check()
    model.to("cuda")
    assert check() == second


def test_what_is_dropped_gives_its_memory_back() -> None:
    def once() -> None:
        model = copy.deepcopy(build("llama")).to("cuda")
        generate(model, torch.tensor(prompts((12,)), device="cuda"), drafter=Lookahead(), max_new_tokens=NEW)

    once()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(8):
        once()
        gc.collect()  # or the next takes another stream, of which cuBLAS has a workspace as well
    torch.cuda.synchronize()
    workspace = 34 * 10**6  # of cuBLAS: the first use of a stream that an earlier test left
    assert torch.cuda.memory_allocated() <= before + workspace
