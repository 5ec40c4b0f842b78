"""What memory runs out for, or Ctrl-C ends, half way through all layers' stores leaves nobody with mixed keys."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo

import draftree
from draftree.drafting.base import RequestState
from draftree.engine import Engine, Request, SamplingParams
from draftree.engine.request import State
from draftree.runner import CudaGraphRunner, inspect_model

KINDS = [torch.OutOfMemoryError, KeyboardInterrupt]


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 4000) for _ in range(count)]


def failing(
    call: Callable[..., Any], at: int, error: type[BaseException], *, later: bool = False
) -> Callable[..., Any]:
    """`call`, whose call number `at` fails, and all `later` ones too."""
    calls = 0

    def wrapped(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at or (later and calls > at):
            raise error("no memory")
        return call(*given, **options)

    return wrapped


def answer(engine: Engine, prompt: list[int], new: int = 16) -> Request:
    request = engine.add(prompt, SamplingParams(new))
    engine.run()
    return request


@pytest.mark.parametrize("error", KINDS)
@pytest.mark.parametrize("kind", ["cpu", "hooked", "fixed shapes"])
def test_a_cache_that_cannot_grow_stays_as_it_is(
    demo: Any, kind: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, more = ids(1, 100), ids(3, 5)
    runner: Any = CudaGraphRunner(inspect_model(demo.model)) if kind == "fixed shapes" else kind
    with Engine(demo.model, slots=1, runner=runner) as engine:
        alone = answer(engine, [*first, *more]).tokens
    with Engine(demo.model, slots=2, runner=runner, keep_prefixes=True) as engine:
        answer(engine, first, 8)
        long = engine.add(ids(2, 400), SamplingParams(4))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_zeros", failing(torch.Tensor.new_zeros, 2, error, later=True))
            with pytest.raises(error):
                engine.run()
        assert isinstance(long.error, error)
        assert len({store.shape[2] for store in engine.cache.keys}) == 1
        after = answer(engine, [*first, *more])
        assert after.reused == len(first)
        assert after.tokens == alone


@pytest.mark.parametrize("error", KINDS)
def test_slots_that_are_left_half_way_end_all_requests_and_keep_nothing(
    demo: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, more = ids(1, 40), ids(2, 40), ids(3, 4)
    with Engine(demo.model, slots=1) as engine:
        alone = [answer(engine, prompt).tokens for prompt in ([*one, *more], [*two, *more])]
    with Engine(demo.model, slots=2, keep_prefixes=True) as engine:
        short, other = engine.add(one, SamplingParams(3)), engine.add(two, SamplingParams(30))
        for _ in range(2):
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.cache, "exchange", failing(engine.cache.exchange, 1, error))
            with pytest.raises(error):
                engine.run()
        assert short.finish_reason == "length"
        assert isinstance(other.error, error)
        assert not engine.busy
        after = [answer(engine, prompt) for prompt in ([*one, *more], [*two, *more])]
        assert [request.reused for request in after] == [0, 0]
        assert [request.tokens for request in after] == alone


def test_a_second_interrupt_leaves_nobody_running(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    class Interrupted(draftree.Lookahead):
        def end(self, request: RequestState) -> None:
            told.append(request.id)
            if len(told) == 1:
                raise KeyboardInterrupt
            super().end(request)

    with Engine(demo.model, slots=3, drafter=Interrupted(), keep_prefixes=True) as engine:
        requests = [engine.add(ids(seed, 40), SamplingParams(new)) for seed, new in enumerate((3, 30, 30))]
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.cache, "exchange", failing(engine.cache.exchange, 1, KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.run()
        assert {request.state for request in requests} == {State.FINISHED}
        assert set(told) == {request.id for request in requests}
        assert len(answer(engine, ids(5, 40)).tokens) == 16


def test_slots_change_whole_or_not_at_all_where_memory_runs_out(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(demo.model, slots=2) as engine:
        engine.add(ids(1, 40), SamplingParams(30))
        engine.add(ids(2, 30), SamplingParams(30))
        for _ in range(3):
            engine.step()
        before = [store.clone() for store in engine.cache.keys]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", failing(torch.empty_like, 1, torch.OutOfMemoryError))
            with pytest.raises(torch.OutOfMemoryError):
                engine.cache.exchange(0, 1)
        assert all(map(torch.equal, before, engine.cache.keys))


def test_prompts_of_other_lengths_that_change_places_half_way(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = ids(1, 1500), ids(2, 20)
    with Engine(demo.model, slots=1) as engine:
        alone = answer(engine, short).tokens
    with Engine(demo.model, slots=3, keep_prefixes=True) as engine:
        first = engine.add(ids(3, 10), SamplingParams(60))
        engine.step()
        late = [engine.add(long, SamplingParams(4)), engine.add(short, SamplingParams(4))]
        with monkeypatch.context() as patch:
            patch.setattr(engine.cache, "exchange", failing(engine.cache.exchange, 1, torch.OutOfMemoryError))
            with pytest.raises(torch.OutOfMemoryError):
                engine.run()
        assert all(isinstance(request.error, torch.OutOfMemoryError) for request in (first, *late))
        after = answer(engine, short)
        assert (after.reused, after.tokens) == (0, alone)


def test_running_requests_keep_their_source_where_a_larger_one_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("t5")

    def scores(*, joined: bool) -> list[float]:
        with Engine(model, slots=2, runner="cpu") as engine:
            running = engine.add([0], SamplingParams(12, logprobs=1), encoder_input=torch.arange(3, 43))
            engine.step()
            if joined:
                late = engine.add([0], SamplingParams(4), encoder_input=torch.arange(3, 90).repeat(4)[:300])
                with monkeypatch.context() as patch:
                    at = len(engine.target.layers) + 1  # the first of the values
                    patch.setattr(torch.Tensor, "new_zeros", failing(torch.Tensor.new_zeros, at, RuntimeError))
                    engine.step()
                assert isinstance(late.error, RuntimeError)
            engine.run()
        assert running.error is None
        return [emitted.scores.chosen for emitted in running.output if emitted.scores is not None]

    assert scores(joined=True) == scores(joined=False)


def test_the_last_that_waits_is_cancelled_while_a_step_looks_for_it(demo: Any) -> None:
    with Engine(demo.model, slots=2) as engine:
        running = engine.add([5, 6, 7], SamplingParams(20))
        engine.step()
        late = engine.add([8, 9], SamplingParams(20))

        class Slow(deque[Request]):
            def popleft(self) -> Request:
                thread = threading.Thread(target=engine.cancel, args=(late,))
                thread.start()
                thread.join()
                return super().popleft()

        engine.waiting = Slow(engine.waiting)
        engine.step()
        engine.waiting = deque(engine.waiting)
        engine.run()
    assert late.finish_reason == "cancelled"
    assert (running.error, running.finish_reason, len(running.tokens)) == (None, "length", 20)
