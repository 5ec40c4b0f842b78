"""The server's answers equal the library's, token by token, with any other requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from few import few
from serve_driver import Running, ids_of
from transformers import LogitsProcessor, LogitsProcessorList

import draftree


class Penalties(LogitsProcessor):
    """Apply OpenAI's penalties token by token."""

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt :].tolist()).items():
            scores[0, token] -= self.frequency * torch.tensor(float(count))
            scores[0, token] -= self.presence
        return scores


@dataclass
class Asked:
    """Hold a request to the server, and equal options of `generate`."""

    body: dict[str, Any]
    options: dict[str, Any]

    def by_library(self, demo: Any) -> list[tuple[list[int], str]]:
        """Return token ids and text of each answer."""
        ids, skip, found = self.body["prompt"], self.body.get("skip_special_tokens", True), []
        for number in range(self.body.get("n", 1)):
            options = self.options | ({"seed": self.options["seed"] + number} if "seed" in self.options else {})
            out = self._generate(demo, torch.tensor([ids]), options | {"max_new_tokens": self.body["max_tokens"]})
            new = out[0, len(ids) :].tolist()
            found.append((new, self._cut(demo.tokenizer.decode(new, skip_special_tokens=skip))))
        return found

    def _generate(self, demo: Any, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        penalties = [self.body.get(name, 0.0) for name in ("frequency_penalty", "presence_penalty")]
        if not any(penalties):
            own_tokenizer = {"tokenizer": demo.tokenizer} if "stop_strings" in options else {}
            sequences: torch.Tensor = draftree.generate(demo.model, ids, **options, **own_tokenizer).sequences
            return sequences
        loop = draftree.custom_generate(seed=options.pop("seed", None), tokenizer=demo.tokenizer)
        own = LogitsProcessorList([Penalties(ids.shape[1], *penalties)])
        given: torch.Tensor = demo.model.generate(ids, custom_generate=loop, logits_processor=own, **options)
        return given

    def _cut(self, text: str) -> str:
        """Return the text before the first stop string."""
        places = [at for stop in self.options.get("stop_strings", ()) if (at := text.find(stop)) >= 0]
        return text[: min(places, default=None)]


def mixed(rng: random.Random, tokenizer: Any) -> Asked:
    words = "the sea is blue and who may count its waves when one of them is gone so far away".split()  # noqa: SIM905
    ids = ids_of(tokenizer, " ".join(rng.choices(words, k=rng.randrange(1, 60))))
    body: dict[str, Any] = {"prompt": ids, "max_tokens": rng.randrange(1, 40), "return_token_ids": True}
    options: dict[str, Any] = {"do_sample": False}
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
    if "repetition_penalty" not in body and rng.random() < 0.3:  # of both, the order would matter
        body |= {rng.choice(["frequency_penalty", "presence_penalty"]): rng.choice([-0.5, 0.7, 1.9])}
    if rng.random() < 0.3:
        biased = rng.sample(range(len(tokenizer)), 50) + rng.sample(ids, min(3, len(ids)))
        bias = {token: rng.choice([-100.0, -3.5, 2.0, 6.0]) for token in biased}
        body["logit_bias"] = {str(token): value for token, value in bias.items()}
        options["sequence_bias"] = [[[token], value] for token, value in bias.items()]
    if rng.random() < 0.3:
        body["ignore_eos"], options["eos_token_id"] = True, []
    if rng.random() < 0.3:
        body["min_tokens"] = options["min_new_tokens"] = rng.randrange(1, body["max_tokens"] + 1)
    elif rng.random() < 0.4:  # in Hugging Face's `generate`, these do not wait for the least tokens
        body["stop"] = options["stop_strings"] = rng.choice([["the"], ["e"], ["\n", " a"], ["is", "of the"], ["zz zz"]])
        body["skip_special_tokens"] = False  # they are looked for in the text of special tokens as well
    if rng.random() < 0.2:
        body["n"] = rng.randrange(2, 4)
    if rng.random() < 0.3:
        body["draftree"] = {"drafter": "off"}
    return Asked(body, options)


Choices = list[tuple[list[int], str]]


async def ask(http: httpx.AsyncClient, body: dict[str, Any], *, whole: bool, broken: bool) -> Choices | None:
    """Return token ids and text of each choice; None for a client that disconnects."""
    if broken and whole:
        with contextlib.suppress(httpx.TimeoutException):
            await http.post("/v1/completions", json=body, timeout=0.05)
        return None
    if whole:
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return [(choice["token_ids"], choice["text"]) for choice in response.json()["choices"]]
    found: Choices = [([], "")] * body.get("n", 1)
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):  # no comment that it waits
                if broken:
                    return None
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    ids, text = found[choice["index"]]
                    found[choice["index"]] = (ids + choice["token_ids"], text + choice["text"])
    return found


@pytest.mark.parametrize("count", few([40, 200], [40]))
def test_mixed_concurrent_requests_equal_the_library(server: Running, demo: Any, count: int) -> None:
    """Requests are greedy or sampled, ragged, with processors and stop strings; one in five is cancelled."""
    rng = random.Random(0)
    asked = [mixed(rng, demo.tokenizer) for _ in range(count)]
    kinds = Counter(name for one in asked for name in one.body)
    assert (
        min(kinds[name] for name in ("n", "stop", "frequency_penalty", "presence_penalty", "logit_bias")) > count // 20
    )

    async def all_of_them() -> list[Choices | None]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(
                *(ask(http, one.body, whole=i % 2 == 1, broken=i % 10 in (3, 6)) for i, one in enumerate(asked))
            )

    answers = asyncio.run(all_of_them())
    compared = 0
    for one, found in zip(asked, answers, strict=True):
        if found is not None:
            assert found == one.by_library(demo), one.body
            compared += 1
    assert compared == count * 4 // 5
    assert server.idle()


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_output_penalties_count_the_answer_only(server: Running, demo: Any, penalty: str) -> None:
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
