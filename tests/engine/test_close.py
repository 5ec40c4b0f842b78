"""However requests end, drafters that others use forget them: engines closed or dropped, streams left, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drafters_for_tests import RandomTree
from generate_driver import prompts

import draftree
from draftree.drafting import Drafter
from draftree.engine import Engine, SamplingParams
from draftree.engine.request import State

MODEL, _ = draftree.demo_model()
PROMPTS = [prompt[:12] for prompt in prompts()]
RULES = SamplingParams(max_new_tokens=12)


def answer(drafter: Drafter | None, prompt: list[int]) -> list[int]:
    with Engine(MODEL, drafter=drafter) as engine:
        request = engine.add(prompt, RULES)
        engine.run()
    return request.tokens


def held(drafter: Any) -> int:
    """How many requests a drafter remembers."""
    if isinstance(drafter, draftree.Merge):
        assert not drafter._joints
        return (
            len(drafter._begun)
            + sum(len(one._waiting) for one in drafter.votes.calibrations)
            + sum(map(held, drafter.drafters))
        )
    if isinstance(drafter, RandomTree):
        return len(drafter.live)
    return len(drafter._seen) + len(drafter.trie._slots)


def merged() -> draftree.Merge:
    return draftree.Merge([draftree.Lookahead(), RandomTree({}), draftree.Lookahead(branch_length=5)])


def closed(engine: Engine, requests: list[Any]) -> None:
    engine.close()
    assert all(request.state is State.FINISHED for request in requests)
    assert not engine.busy
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        engine.add(PROMPTS[0])


def dropped(engine: Engine, requests: list[Any]) -> None:
    """Nothing to do: the caller drops it."""


def stream_closed(engine: Engine, requests: list[Any]) -> None:
    streams = [engine.stream(request) for request in requests]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    assert not engine.busy


@pytest.mark.parametrize("make", [draftree.Lookahead, merged])
@pytest.mark.parametrize("leave", [closed, left, dropped, stream_closed, stream_dropped])
def test_nothing_is_left(leave: Callable[..., None], make: Callable[[], Drafter]) -> None:
    drafter = make()
    engine = Engine(MODEL, drafter=drafter, slots=2)
    requests = [engine.add(prompt, RULES) for prompt in PROMPTS[:4]]
    engine.step()
    assert held(drafter) > 0
    leave(engine, requests)
    del engine, requests
    assert held(drafter) == 0
    assert answer(drafter, PROMPTS[0]) == answer(None, PROMPTS[0])


def test_a_request_of_another_engine() -> None:
    one, other = Engine(MODEL), Engine(MODEL)
    request = one.add(PROMPTS[0], RULES)
    with pytest.raises(ValueError, match="belongs to another engine"):
        other.cancel(request)
    one.step()
    with pytest.raises(ValueError, match="belongs to another engine"):
        other.cancel(request)
    one.run()
    other.cancel(request)  # it has finished, and stays as it is
    assert request.finish_reason != "cancelled"


def test_generate_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

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
