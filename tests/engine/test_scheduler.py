"""Prompts are read in chunks between the steps of others; free slots keep keys and values for equal beginnings."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import zoo
from few import crossed

import draftree
from draftree.engine import Engine, SamplingParams
from draftree.engine import engine as engine_module
from draftree.engine.request import Request
from draftree.engine.scheduler import reading_groups

LONG, SHORT = 60, 12
HYBRIDS = {  # Models with recurrent layers, in C and by their own functions.
    "compiled hybrid": ("qwen3_5", "lfm2"),
    "hooked hybrid": ("nemotron_h", "qwen3_next", "olmo_hybrid", "granitemoehybrid", "bamba", "falcon_h1"),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(engine_module, "LEAST_CHUNK", 4)


def prompt(seed: int, length: int, front: list[int] | None = None) -> list[int]:
    rng = random.Random(seed)
    return [*(front or []), *(rng.randrange(90) for _ in range(length))]


def alone(model: Any, ids: list[int], new: int = 12) -> list[int]:
    out = draftree.generate(model, torch.tensor([ids]), torch.ones(1, len(ids)), max_new_tokens=new, eos_token_id=[])
    return out.sequences[0, len(ids) :].tolist()


def test_a_long_prompt_stops_running_requests_for_one_chunk_a_step() -> None:
    model = zoo.build("llama")
    with Engine(model, slots=4) as engine:
        first = engine.add(prompt(1, SHORT), SamplingParams(40))
        engine.step()
        late = engine.add(prompt(2, LONG), SamplingParams(12))
        steps = 0
        while not late.output:
            before = len(first.output)
            engine.step()
            steps += 1
            assert len(first.output) == before + 1  # it goes on in every step
        assert steps == 4  # 59 rows by 16
        engine.run()
    assert first.tokens == alone(model, prompt(1, SHORT), 40)
    assert late.tokens == alone(model, prompt(2, LONG))


def test_a_short_prompt_overtakes_a_long_one() -> None:
    model = zoo.build("llama")
    with Engine(model, slots=4) as engine:
        running = engine.add(prompt(1, SHORT), SamplingParams(40))
        engine.step()
        long = engine.add(prompt(2, LONG), SamplingParams(12))
        engine.step()
        short = engine.add(prompt(3, 5), SamplingParams(12))
        engine.step()
        assert short.output
        assert not long.output
        engine.run()
    for request in (running, long, short):
        ids = request.context.tokens[: request.context.prompt_length]
        assert request.tokens == alone(model, ids, len(request.tokens))


def test_prompts_are_padded_together_only_where_that_is_cheap() -> None:
    assert reading_groups([119, 300, 40, 45]) == [(0, 1), (1, 2), (2, 4)]
    assert reading_groups([3, 9, 1, 0]) == [(0, 4)]
    assert reading_groups([100, 110, 90, 130]) == [(0, 4)]
    assert reading_groups([300]) == [(0, 1)]
    assert reading_groups([]) == []


@pytest.mark.parametrize(
    ("family", "keep", "drafter"),
    crossed(
        ["llama", "gemma2", "gpt2", "t5", "phi3-longrope", *HYBRIDS],
        [False, True],
        ["none", "lookahead", "prompt-lookup"],
    ),
)
def test_any_traffic_gets_the_texts_of_requests_alone(family: str, keep: bool, drafter: str) -> None:
    """Requests of all lengths join, share beginnings, go on, are cancelled and leave, while prompts are read."""
    rng = random.Random(f"{family}{keep}{drafter}")
    model = zoo.build(rng.choice(HYBRIDS.get(family, (family,))))
    make = {"none": lambda: None, "lookahead": draftree.Lookahead}
    made = make.get(drafter, draftree.PromptLookup)()
    fronts = [prompt(s, n) for s, n in ((1, 8), (2, 20), (3, 33))]
    asked: list[tuple[Request, list[int], list[int] | None]] = []
    with Engine(model, drafter=made, slots=4, keep_prefixes=keep) as engine:
        for turn in range(60):
            if turn < 30 and rng.random() < 0.5:
                front, salt, source = rng.choice([*fronts, []]), rng.choice([None, "other"]), None
                answered = [request for request, _, _ in asked if request.finish_reason == "length"][-2:]
                if engine.target.encoder_decoder:
                    source = prompt(turn + 99, 7)
                elif answered and rng.random() < 0.6:
                    front, salt = rng.choice([(r.context.tokens[:90], r.params.cache_salt) for r in answered])
                ids = prompt(turn, rng.randrange(1, 12), front)
                params = SamplingParams(rng.randrange(1, 12), cache_salt=salt)
                encoder = None if source is None else torch.tensor(source)
                asked.append((engine.add(ids, params, encoder_input=encoder), ids, source))
            if asked and rng.random() < 0.1:
                engine.cancel(rng.choice(asked)[0])
            if engine.busy:
                engine.step()
        engine.run()
        reused = sum(request.reused for request, _, _ in asked)
        if family in HYBRIDS:  # By chance: a slot has two states only.
            assert keep or not reused
        else:
            assert bool(reused) == (keep and family not in ("t5", "phi3-longrope"))
        for request, ids, source in asked:
            with Engine(model, slots=1) as plain:
                encoder = None if source is None else torch.tensor(source)
                expected = plain.add(ids, SamplingParams(request.params.max_new_tokens), encoder_input=encoder)
                plain.run()
            assert request.tokens == expected.tokens[: len(request.tokens)]
            assert request.finish_reason == "cancelled" or request.tokens == expected.tokens


def test_a_dialogue_reads_only_what_is_new_and_a_stranger_all() -> None:
    model = zoo.build("llama")
    first = prompt(1, 20)
    with Engine(model, slots=2, keep_prefixes=True) as engine:
        one = engine.add(first, SamplingParams(6, cache_salt="a"))
        engine.run()
        second = [*first, *one.tokens, *prompt(2, 5)]
        stranger = engine.add(second, SamplingParams(6, cache_salt="b"))
        engine.run()
        assert stranger.reused == 0
        two = engine.add(second, SamplingParams(6, cache_salt="a"))
        engine.run()
        assert two.reused == len(first) + 5  # the newest token of an answer has not been read
        assert two.tokens == stranger.tokens == alone(model, second, 6)
        again = engine.add(second, SamplingParams(6, cache_salt="a"))
        engine.run()
        assert again.reused == len(second) - 1  # the last token of a prompt is read anew: its logits are needed


def test_what_was_left_longest_ago_makes_room() -> None:
    model = zoo.build("llama")
    prompts = [prompt(s, 20) for s in range(4)]
    with Engine(model, slots=3, keep_prefixes=True) as engine:
        for ids in prompts:
            engine.add(ids, SamplingParams(2))
            engine.run()
        found = []
        for ids in reversed(prompts):
            found.append(engine.add(ids, SamplingParams(2)))
            engine.run()
    assert [request.reused for request in found] == [19, 19, 19, 0]


def test_a_front_is_taken_from_a_running_request() -> None:
    model, front = zoo.build("llama"), prompt(1, 30)
    with Engine(model, slots=2, keep_prefixes=True) as engine:
        one = engine.add([*front, 5], SamplingParams(20))
        while not one.output:
            engine.step()
        two = engine.add([*front, 7, 8], SamplingParams(20))
        engine.run()
    assert two.reused == 30
    assert one.tokens == alone(model, [*front, 5], 20)
    assert two.tokens == alone(model, [*front, 7, 8], 20)


def test_what_free_slots_keep_outlives_growth_of_the_cache(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 512)  # it grows before anything of the long prompt is kept
    model, other = demo.model, prompt(11, 400)
    first = prompt(10, 100)
    with Engine(model, slots=2, keep_prefixes=True) as engine:
        for ids in (first, other):
            engine.add(ids, SamplingParams(1))
            engine.run()
        again = engine.add([*first, *prompt(12, 5)], SamplingParams(12))
        engine.run()
    assert again.reused >= 95
    assert again.tokens == alone(model, [*first, *prompt(12, 5)])


def test_dialogues_that_begin_alike_keep_a_slot_each() -> None:
    model, front = zoo.build("llama"), prompt(1, 12)  # as a system prompt
    with Engine(model, slots=4, keep_prefixes=True) as engine:
        texts = [[*front, who, *prompt(who, 8)] for who in range(3)]
        for turn in range(3):
            for who, text in enumerate(texts):
                request = engine.add(text, SamplingParams(4))
                engine.run()
                assert request.reused == (len(text) - 6 if turn else len(front) * bool(who))
                assert request.tokens == alone(model, text, 4)
                texts[who] = [*text, *request.tokens, *prompt(10 * turn + who, 5)]
