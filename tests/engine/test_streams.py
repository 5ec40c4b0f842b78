"""Options in place of params, and streams in threads and asyncio, also closed early."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from generate_driver import NEW, prompts
from transformers import MaxTimeCriteria, MinLengthLogitsProcessor
from zoo import build

from draftree import Engine, Fixed, Lookahead, SamplingParams, generate

ROWS = prompts()


def wanted(row: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([row])
    return generate(build("llama"), ids, **({"max_new_tokens": NEW} | options)).sequences[0, len(row) :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 1.3, "top_k": 20, "seed": 4},
        {"repetition_penalty": 1.4, "min_new_tokens": 9},
        {"eos_token_id": [5, 9]},
        {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 3},  # of the prompt, without an encoder
    ],
    ids=str,
)
def test_options_in_place_of_rules(options: dict[str, Any]) -> None:
    with Engine(build("llama"), drafter=Lookahead(), slots=2) as engine:
        requests = [engine.add(row, max_new_tokens=NEW, **options) for row in ROWS]
        engine.run()
    assert [request.tokens for request in requests] == [wanted(row, **options) for row in ROWS]


def test_what_requests_share_stands_beside_options() -> None:
    """And the model's own end tokens stay, which `SamplingParams` in their place would not have."""
    own = {
        "drafting": False,
        "cache_salt": "a",
        "logprobs": 2,
        "keep_trees": True,
        "node_budget": 3,
        "prediction": (5, 6),
    }
    with Engine(build("llama"), drafter=Lookahead(), shape=Fixed(4)) as engine:
        plain = engine.add(ROWS[0], max_new_tokens=NEW, **own)
        drafted = engine.add(ROWS[0] * 2, max_new_tokens=NEW)
        engine.run()
    assert {name: getattr(plain.params, name) for name in own} == own
    assert plain.params.eos_token_ids == drafted.params.eos_token_ids == (2,)
    assert plain.stats.drafted == 0 < drafted.stats.drafted
    assert len(plain.output[0].scores.likeliest) == 2


def test_wrong_options() -> None:
    with Engine(build("llama")) as engine:
        with pytest.raises(TypeError, match="add got params and the option 'max_new_tokens'"):
            engine.add([5], SamplingParams(), max_new_tokens=3)
        with pytest.raises(TypeError, match="Did you mean 'temperature'"):
            engine.add([5], temperatur=1)
        with pytest.raises(ValueError, match="one request has one answer"):
            engine.add([5], do_sample=True, num_return_sequences=2)
        with pytest.raises(ValueError, match="beam"):
            engine.add([5], num_beams=2)
        assert not engine.busy


def test_rules_take_lists() -> None:
    params = SamplingParams(4, processors=[MinLengthLogitsProcessor(99, 2)], criteria=[MaxTimeCriteria(99.0)])
    with Engine(build("llama")) as engine:
        request = engine.add(ROWS[0], params)
        engine.run()
    assert len(request.tokens) == 4


def test_streams_in_threads() -> None:
    """More readers than slots; each gets its own text, and two break theirs off."""
    found: dict[int, list[int]] = {}
    errors: list[BaseException] = []
    with Engine(build("llama"), drafter=Lookahead(), slots=3) as engine:

        def read(number: int) -> None:
            try:
                row = ROWS[number % len(ROWS)]
                stream = engine.stream(engine.add(row, max_new_tokens=NEW))
                found[number] = []
                for emitted in stream:
                    found[number].append(emitted.token)
                    if number in (2, 5) and len(found[number]) == 3:
                        stream.close()  # type: ignore[attr-defined]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert not engine.busy
    for number, tokens in found.items():
        text = wanted(ROWS[number % len(ROWS)])
        assert tokens == (text[:3] if number in (2, 5) else text)


def test_streams_in_asyncio() -> None:
    async def main() -> list[list[int]]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async def read(row: list[int], most: int | None = None) -> list[int]:
            got: list[int] = []
            stream = engine.astream(engine.add(row, max_new_tokens=NEW))
            async for emitted in stream:
                got.append(emitted.token)
                if len(got) == most:
                    await stream.aclose()  # type: ignore[attr-defined]
                    break
            return got

        with Engine(build("llama"), drafter=Lookahead(), slots=2) as engine:
            clock = asyncio.create_task(tick())
            found = await asyncio.gather(*(read(row) for row in ROWS), read(ROWS[0], 4))
            clock.cancel()
            assert not engine.busy
        assert ticks > NEW, "the event loop went on"
        return found

    *texts, cut = asyncio.run(main())
    assert texts == [wanted(row) for row in ROWS]
    assert cut == wanted(ROWS[0])[:4]
