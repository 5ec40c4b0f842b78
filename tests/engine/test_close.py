"""A shared drafter forgets requests however they end: engine closed or dropped, stream closed, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import prompts

import draftree
from draftree.drafting import Drafter
from draftree.engine import Engine, SamplingParams
from draftree.engine.request import State

MODEL, _ = draftree.demo_model()
PROMPTS = [prompt[:12] for prompt in prompts()]
PARAMS = SamplingParams(max_new_tokens=12)


def answer(drafter: Drafter | None, prompt: list[int]) -> list[int]:
    with Engine(MODEL, drafter=drafter) as engine:
        request = engine.add(prompt, PARAMS)
        engine.run()
    return request.tokens


def held(drafter: Any) -> int:
    """Return how many requests a drafter remembers."""
    if isinstance(drafter, draftree.Merge):
        return sum(map(held, drafter.drafters))
    return len(drafter.live) if isinstance(drafter, RandomTree) else drafter.trie.live_requests


def merged() -> draftree.Merge:
    return draftree.Merge([draftree.Lookahead(), RandomTree({})])


def closed(engine: Engine, requests: list[Any]) -> None:
    engine.close()
    assert all(request.state is State.FINISHED for request in requests)
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        engine.add(PROMPTS[0])


def dropped(engine: Engine, requests: list[Any]) -> None:
    """Leave the engine to its destructor."""


def streams_closed(engine: Engine, requests: list[Any]) -> None:
    streams = [engine.stream(request) for request in requests]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()
    assert not engine.busy


@pytest.mark.parametrize("make", [draftree.Lookahead, merged])
@pytest.mark.parametrize("leave", [closed, dropped, streams_closed])
def test_a_drafter_forgets_every_request(leave: Callable[..., None], make: Callable[[], Drafter]) -> None:
    drafter = make()
    engine = Engine(MODEL, drafter=drafter, slots=2)
    requests = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    engine.step()
    assert held(drafter) > 0
    leave(engine, requests)
    del engine, requests
    assert held(drafter) == 0
    assert answer(drafter, PROMPTS[0]) == answer(None, PROMPTS[0])


def test_a_stream_that_was_never_read_cancels_nothing() -> None:
    with Engine(MODEL) as engine:
        request = engine.add(PROMPTS[0], PARAMS)
        engine.stream(request).close()
        engine.run()
    assert request.finish_reason == "length"
    assert request.tokens == answer(None, PROMPTS[0])


def test_a_request_of_another_engine() -> None:
    one, other = Engine(MODEL), Engine(MODEL)
    request = one.add(PROMPTS[0], PARAMS)
    with pytest.raises(ValueError, match="belongs to another engine"):
        other.cancel(request)
    with pytest.raises(ValueError, match="another engine"):
        list(other.stream(request))
    one.run()
    other.cancel(request)  # A finished request stays as it is.
    assert request.finish_reason != "cancelled"


def test_generate_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, calls = merged(), []
    draft = drafter.draft

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return draft(*args)

    monkeypatch.setattr(drafter, "draft", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draftree.generate(MODEL, torch.tensor([PROMPTS[0]]), drafter=drafter, max_new_tokens=30)
    assert held(drafter) == 0
