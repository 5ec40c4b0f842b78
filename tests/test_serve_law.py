"""The server answers what the library answers, token for token, whatever else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

import httpx
import pytest
import torch
from serve_driver import Running, ids_of

import draftree


def by_library(demo: Any, ids: list[int], new: int, **options: Any) -> list[int]:
    out = draftree.generate(demo[0], torch.tensor([ids]), max_new_tokens=new, **options)
    return out.sequences[0, len(ids) :].tolist()


def mixed(rng: random.Random, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """A request to the server, the same as options of `generate`, and its prompt."""
    words = "the sea is blue and who may count its waves when one of them is gone so far away".split()  # noqa: SIM905
    ids = ids_of(tokenizer, " ".join(rng.choices(words, k=rng.randrange(1, 60))))
    body: dict[str, Any] = {"prompt": ids, "max_tokens": rng.randrange(1, 40), "return_token_ids": True}
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        body |= {"temperature": 0}
        if rng.random() < 0.3:
            body["repetition_penalty"] = options["repetition_penalty"] = 1.3
    else:
        seed = rng.randrange(10**6)
        body |= {"temperature": rng.choice([0.7, 1.0, 1.4]), "seed": seed}
        options |= {"do_sample": True, "seed": seed, "temperature": body["temperature"], "top_k": 0, "top_p": 1.0}
        for name, value in (("top_k", 20), ("top_p", 0.8), ("min_p", 0.05), ("typical_p", 0.9)):
            if rng.random() < 0.4:
                body[name] = options[name] = value
    if rng.random() < 0.3:
        body["ignore_eos"], options["eos_token_id"] = True, []
    if rng.random() < 0.3:
        body["min_tokens"] = options["min_new_tokens"] = rng.randrange(1, body["max_tokens"] + 1)
    if rng.random() < 0.3:
        body["draftree"] = {"drafter": "off"}
    return body, options, ids


def test_two_hundred_mixed_requests_at_once_equal_the_library(server: Running, demo: Any) -> None:
    """Greedy and sampled, ragged, with processors, streamed or not, and one in ten cancelled in the middle."""
    rng = random.Random(0)
    asked = [mixed(rng, demo[1]) for _ in range(200)]

    async def one(http: httpx.AsyncClient, i: int) -> list[int] | None:
        body = asked[i][0]
        if i % 10 == 3:  # goes away after a moment
            with contextlib.suppress(httpx.TimeoutException):
                await http.post("/v1/completions", json=body, timeout=0.05)
            return None
        if i % 2:
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["token_ids"]
        found: list[int] = []
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            async for line in stream.aiter_lines():
                if line and line != "data: [DONE]":
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        found += choice["token_ids"]
        return found

    async def all_of_them() -> list[list[int] | None]:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=200)
        ) as http:
            return await asyncio.gather(*(one(http, i) for i in range(len(asked))))

    answers = asyncio.run(all_of_them())
    compared = 0
    for (body, options, ids), found in zip(asked, answers, strict=True):
        if found is not None:
            assert found == by_library(demo, ids, body["max_tokens"], **options), body
            compared += 1
    assert compared == 180
    assert server.idle()


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_output_penalties_count_the_answer_alone(server: Running, demo: Any, penalty: str) -> None:
    model, tokenizer = demo
    ids = ids_of(tokenizer, "The sea and the sea and the sea")
    fields = {"max_tokens": 30, "return_token_ids": True, "ignore_eos": True}
    answer = server.complete(ids, **fields, **{penalty: 1.5})
    found = answer["choices"][0]["token_ids"]
    new: list[int] = []
    with torch.no_grad():
        for _ in range(30):
            logits = model(torch.tensor([[*ids, *new]])).logits[0, -1]
            counts = torch.bincount(torch.tensor(new, dtype=torch.long), minlength=len(logits))
            new.append(int((logits - 1.5 * (counts if "freq" in penalty else counts.clamp(max=1))).argmax()))
    assert found == new
    assert (
        found != server.complete(ids, max_tokens=30, return_token_ids=True, ignore_eos=True)["choices"][0]["token_ids"]
    )


def test_logit_bias(server: Running, demo: Any) -> None:
    plain = server.complete("Hello", return_token_ids=True)["choices"][0]["token_ids"]
    banned = server.complete("Hello", return_token_ids=True, logit_bias={str(plain[0]): -100})
    assert banned["choices"][0]["token_ids"][0] != plain[0]
    forced = server.complete("Hello", return_token_ids=True, max_tokens=4, logit_bias={"7": 100})
    assert forced["choices"][0]["token_ids"] == [7] * 4
