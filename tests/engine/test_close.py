"""However requests end, drafters that others use forget them: engines closed or dropped, streams left, Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from drafters_for_tests import RandomTree
from few import crossed
from generate_driver import prompts

import draftree
from draftree.drafting import Drafter
from draftree.engine import Engine, SamplingParams
from draftree.engine.request import Request, State

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


def left(engine: Engine, requests: list[Any]) -> None:
    with engine:
        pass
    assert [request.finish_reason for request in requests] == ["cancelled"] * len(requests)


def dropped(engine: Engine, requests: list[Any]) -> None:
    """Nothing to do: the caller drops it."""


def stream_closed(engine: Engine, requests: list[Any]) -> None:
    streams = [engine.stream(request) for request in requests]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    assert not engine.busy


def stream_dropped(engine: Engine, requests: list[Any]) -> None:
    for request in requests:
        stream = engine.stream(request)
        next(stream)
        del stream
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


@pytest.mark.parametrize(
    ("error", "when", "place", "kind"),
    crossed(
        [KeyboardInterrupt, SystemExit, ValueError],
        ["begin", "draft", "observe", "end"],
        ["before", "behind"],
        ["lookahead", "merge"],
    ),
)
def test_interrupted(
    kind: str, place: str, when: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in the drafter or one of those that a merge joins; an ordinary error ends the request alone."""
    drafter: Any = draftree.Lookahead() if kind == "lookahead" else merged()
    if kind == "lookahead" and when == "observe":
        pytest.skip("A trie observes nothing.")
    part = drafter if kind == "lookahead" else drafter.drafters[1]
    method, calls = getattr(part, when), []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1 and place == "before":
            raise error("now")
        result = method(*args)
        if len(calls) == 1:
            raise error("now")
        return result

    monkeypatch.setattr(part, when, interrupted)
    engine = Engine(MODEL, drafter=drafter, slots=3)
    requests = [engine.add(prompt, RULES) for prompt in PROMPTS[:3]]
    if error is ValueError and when in ("begin", "end"):
        engine.run()
        assert sum(request.error is not None for request in requests) == 1
    else:
        with pytest.raises(error, match="now"):
            engine.run()
    engine.close()
    assert not engine.running
    assert all(request.state is State.FINISHED for request in requests)
    monkeypatch.undo()
    if not (place == "before" and when == "end" and error is ValueError):  # a drafter that will not forget
        assert held(drafter) == 0
    assert answer(drafter, PROMPTS[1]) == answer(None, PROMPTS[1])


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


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_request_that_is_ended_while_it_gets_its_slot(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODEL, slots=2)
    request = engine.add(PROMPTS[0], RULES)
    enter = engine.scheduler.enter

    def ended_meanwhile(joining: Request) -> None:
        thread = threading.Thread(target=lambda: engine.cancel(joining) if end == "cancel" else engine.close())
        thread.start()
        thread.join()
        enter(joining)

    monkeypatch.setattr(engine.scheduler, "enter", ended_meanwhile)
    engine.run()
    assert (request.state, request.finish_reason, request.tokens) == (State.FINISHED, "cancelled", [])


def test_no_step_begins_while_a_slot_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODEL, slots=2)
    one, other = (engine.add(prompt, RULES) for prompt in PROMPTS[:2])
    engine.step()
    known, seen, leave = len(other.tokens), [], engine.scheduler.leave
    thread = threading.Thread(target=engine.step)

    def leave_slowly(request: Request) -> None:
        if not thread.ident:
            thread.start()
            thread.join(0.5)
            seen.append(len(other.tokens))
        leave(request)

    monkeypatch.setattr(engine.scheduler, "leave", leave_slowly)
    engine.cancel(one)
    thread.join()
    assert seen == [known]
    assert len(other.tokens) > known


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
