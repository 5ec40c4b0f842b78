"""Requests join, queue, leave and are cancelled between steps, and each gets the same text as alone."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from drafters_for_tests import InModel, RandomTree
from generate_driver import prompts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper
from zoo import build

from draftree.drafting import Drafter, Lookahead
from draftree.engine import Emitted, Engine, Request, RunStats, SamplingParams, State, generate
from draftree.engine import engine as engine_module
from draftree.shaping import DynamicTree, Fixed, shape_for

PROMPTS = prompts((5, 17, 9, 30, 1, 12), seed=6)
KINDS = ("greedy", "sampled", "processed")


def params_of(kind: str, number: int, new: int = 18) -> SamplingParams:
    """Return fresh sampling parameters; frequent ids of the tiny llama end some texts early."""
    if kind == "greedy":
        return SamplingParams(max_new_tokens=new, eos_token_ids=(2, 60))
    if kind == "sampled":
        processors = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
        return SamplingParams(max_new_tokens=new, eos_token_ids=(2,), sample=True, seed=number, processors=processors)
    return SamplingParams(max_new_tokens=new, processors=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)]))


@functools.cache
def alone(name: str, number: int, kind: str) -> tuple[int, ...]:
    """Return the answer of the plain engine to prompt `number`."""
    engine = Engine(build(name))
    request = engine.add(PROMPTS[number], params_of(kind, number))
    engine.run()
    assert request.error is None
    return tuple(request.tokens)


def known(name: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(p): alone(name, i, "greedy") for i, p in enumerate(PROMPTS)}


def drafter_of(kind: str, name: str) -> Drafter:
    if kind == "in-model":
        return InModel(known(name), seed=4)
    if kind == "lookahead":
        return Lookahead(decoding_length=16, branch_length=5)
    return RandomTree(known(name), seed=5)


def check(request: Request, name: str, number: int, kind: str) -> None:
    assert request.error is None
    assert request.state is State.FINISHED
    expected = alone(name, number, kind)
    if request.finish_reason == "cancelled":
        assert tuple(request.tokens) == expected[: len(request.tokens)]
    else:
        assert tuple(request.tokens) == expected
    assert request.context.tokens == PROMPTS[number] + request.tokens


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.sampled_from(KINDS)),
        st.tuples(st.just("step"), st.integers(1, 4), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.none()),
    ),
    min_size=4,
    max_size=24,
)


def play(name: str, drafter: Drafter, slots: int, script: list[Any], runner: str = "auto") -> None:
    engine = Engine(build(name), drafter=drafter, shape=Fixed(8), slots=slots, runner=runner)
    made: list[tuple[Request, int, str]] = []
    for what, number, kind in script:
        if what == "add":
            made.append((engine.add(PROMPTS[number], params_of(kind, number)), number, kind))
        elif what == "step":
            for _ in range(number):
                engine.step()
                assert len(engine.running) <= slots
                assert all(r.state is State.RUNNING for r in engine.running)
        elif made:
            engine.cancel(made[number % len(made)][0])
    engine.run()
    for request, number, kind in made:
        check(request, name, number, kind)
    assert engine.cache.lengths == [0] * slots


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(events, st.integers(1, 4), st.sampled_from(["random", "lookahead", "in-model"]))
def test_any_schedule(script: list[Any], slots: int, kind: str) -> None:
    drafter = drafter_of(kind, "llama")
    play("llama", drafter, slots, script, "cpu" if len(script) % 2 else "hooked")
    if isinstance(drafter, RandomTree):
        assert not drafter.live


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "bloom", "mpt", "deepseek_v3", "llama-dynamic"])
def test_any_schedule_in_any_family(name: str) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(events, st.integers(1, 4), st.sampled_from(["random", "lookahead", "in-model"]))
    def body(script: list[Any], slots: int, kind: str) -> None:
        play(name, drafter_of(kind, name), slots, script)

    body()


def test_more_requests_than_slots_wait_in_order() -> None:
    engine = Engine(build("llama"), drafter=drafter_of("random", "llama"), shape=Fixed(8), slots=2)
    made = [engine.add(PROMPTS[n], params_of("greedy", n)) for n in range(6)]
    engine.step()
    assert [r.state for r in made[:3]] == [State.RUNNING, State.RUNNING, State.WAITING]
    started: list[int] = []
    while engine.busy:
        engine.step()
        started += [r.id for r in made if r.output and r.id not in started]
    assert started == [r.id for r in made]
    for n, request in enumerate(made):
        check(request, "llama", n, "greedy")


def test_cancel_from_a_callback() -> None:
    """Slots must not move during a step."""
    engine = Engine(build("llama"), drafter=drafter_of("random", "llama"), shape=Fixed(8), slots=4)
    made: list[Request] = []

    def stop_others(emitted: Emitted) -> None:
        if len(made[1].output) == 3:
            engine.cancel(made[0])
            engine.cancel(made[1])
            engine.cancel(made[4])

    for n in range(5):
        made.append(engine.add(PROMPTS[n], params_of("processed", n), on_token=stop_others if n == 1 else None))
    engine.run()
    assert [r.finish_reason for r in made] == ["cancelled", "cancelled", "length", "length", "cancelled"]
    assert len(made[1].output) == 3
    assert made[4].output == []
    for n, request in enumerate(made):
        check(request, "llama", n, "processed")


def test_streams_advance_together() -> None:
    engine = Engine(build("llama"), drafter=drafter_of("random", "llama"), shape=Fixed(8), slots=2)
    made = [engine.add(PROMPTS[n], params_of("greedy", n)) for n in range(3)]
    got = [e.token for e in engine.stream(made[2])]
    assert tuple(got) == alone("llama", 2, "greedy")
    assert len(made[0].output) > 0
    engine.run()
    for n, request in enumerate(made):
        check(request, "llama", n, "greedy")
    assert [e.token for e in engine.stream(made[0])] == made[0].tokens


@pytest.mark.parametrize(("runner", "kind"), [("cpu", "random"), ("hooked", "in-model")])
def test_two_engines_on_one_model(runner: str, kind: str) -> None:
    model = build("llama")
    engines = [
        Engine(model, drafter=drafter_of(kind, "llama"), shape=Fixed(8), slots=2, runner=runner) for _ in range(2)
    ]
    made = [engines[n % 2].add(PROMPTS[n], params_of("greedy", n)) for n in range(6)]
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.step()
    for n, request in enumerate(made):
        check(request, "llama", n, "greedy")


@pytest.mark.parametrize(
    ("name", "kind", "chunk", "slots"),
    [
        ("llama", "random", 1, 1),
        ("llama", "in-model", 2, 4),
        ("llama", "lookahead", 5, 4),
        ("gemma3", "random", 4, 3),
        ("gpt2", "random", 4, 3),
        ("bloom", "random", 4, 3),
        ("llama-dynamic", "random", 4, 3),
    ],
)
def test_prompts_in_chunks(name: str, kind: str, chunk: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [alone(name, n, "greedy") for n in range(6)]  # Computed before the chunks get small.
    drafter = drafter_of(kind, name)
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", chunk)
    engine = Engine(build(name), drafter=drafter, shape=Fixed(8), slots=slots)
    made = [engine.add(PROMPTS[n], params_of("greedy", n)) for n in range(6)]
    engine.run()
    assert [tuple(r.tokens) for r in made] == expected


@pytest.mark.parametrize(("slots", "kind"), [(1, "random"), (3, "in-model")])
def test_statistics_add_up(slots: int, kind: str) -> None:
    engine = Engine(build("llama"), drafter=drafter_of(kind, "llama"), shape=Fixed(8), slots=slots)
    made = [engine.add(PROMPTS[n], params_of(k, n)) for n in range(6) for k in KINDS]
    engine.run()
    for request in made:
        stats = request.stats
        last_was_drafted = request.output[-1].source is not None
        assert stats.emitted == len(request.output) == stats.steps + stats.accepted - last_was_drafted
        assert sum(stats.accepted_by_depth) == stats.accepted == sum(e.source is not None for e in request.output)
        assert stats.accepted_by_depth == sorted(stats.accepted_by_depth, reverse=True)
        assert sum(stats.accepted_by_source.values()) == stats.accepted <= stats.drafted
        assert set(stats.accepted_by_source) <= {f"random/{bits}" for bits in (1, 2, 3)}
        assert all(spent >= 0 for spent in stats.seconds.values())
        assert stats.acceptance_length == 1 + stats.accepted / stats.steps
    run = RunStats([request.stats for request in made])
    assert run.total.accepted == sum(r.stats.accepted for r in made) > 20
    assert run.total.drafted > run.total.accepted
    assert run.total.emitted == sum(len(r.output) for r in made)


def test_the_summary_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.tensor([PROMPTS[1]])
    out = generate(build("llama"), ids, drafter=drafter_of("random", "llama"), shape=Fixed(8), max_new_tokens=18)
    text = out.stats.summary()
    assert capsys.readouterr().out == text
    total = out.stats.total
    assert text.endswith(f"{total.steps} passes for 18 tokens, in {total.total_seconds:.2f} s.\n")
    rows = dict(re.findall(r"^│ (.*?) +│ (.*?) +│$", text, re.M))
    assert (rows["draft tokens"], rows["draft tokens accepted"]) == (str(total.drafted), str(total.accepted))
    assert rows["most accepted in one pass"] == str(len(total.accepted_by_depth))
    assert all(rows.values()), "one fact a row"
    assert "random/" in text
    assert str(total.as_dict()["acceptance_length"])[:4] in text


def test_rejecting_everything_is_plain_decoding() -> None:
    drafter = drafter_of("random", "llama")
    engine = Engine(build("llama"), drafter=drafter, shape=Fixed(8), reject_drafts=True)
    made = [engine.add(PROMPTS[n], params_of(k, n)) for n in range(3) for k in KINDS]
    engine.run()
    for (n, kind), request in zip([(n, k) for n in range(3) for k in KINDS], made, strict=True):
        check(request, "llama", n, kind)
        assert request.stats.accepted == 0 < request.stats.drafted


def test_one_drafter_learns_over_calls() -> None:
    drafter = Lookahead()
    ids = torch.tensor([PROMPTS[1]])
    cold = generate(build("llama"), ids, drafter=drafter, shape=Fixed(16), max_new_tokens=18)
    warm = generate(build("llama"), ids, drafter=drafter, shape=Fixed(16), max_new_tokens=18)
    assert torch.equal(cold.sequences, warm.sequences)
    assert warm.stats.total.steps < cold.stats.total.steps
    assert isinstance(shape_for(drafter), DynamicTree)  # a shape that was given is that of its call


def test_what_an_encoder_reads_is_checked_before_the_request_waits() -> None:
    engine = Engine(build("t5"))
    with pytest.raises(ValueError, match="has an encoder"):
        engine.add([0], max_new_tokens=4)
    with pytest.raises(ValueError, match="vocabulary"):
        engine.add([0], max_new_tokens=4, encoder_input=torch.tensor([5, 100_000]))
    with pytest.raises(TypeError, match="encoder_input is a list: pass a tensor"):
        engine.add([0], max_new_tokens=4, encoder_input=[5, 6])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no encoder"):
        Engine(build("llama")).add([5, 9], max_new_tokens=4, encoder_input=torch.tensor([5]))
