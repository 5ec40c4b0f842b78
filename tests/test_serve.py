"""The server under the OpenAI API: answers, streams, refusals, keys, limits."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from serve_driver import Running, serving

import draftree

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def demo() -> Any:
    return draftree.demo_model()


@pytest.fixture(scope="module")
def server(demo: Any) -> Iterator[Running]:
    with serving(*demo) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text).input_ids
    return found


def by_library(demo: Any, ids: list[int], new: int, **options: Any) -> list[int]:
    out = draftree.generate(demo[0], torch.tensor([ids]), max_new_tokens=new, **options)
    return out.sequences[0, len(ids) :].tolist()


# ---------------------------------------------------------------- equal answers


def mixed(rng: random.Random, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """A request to the server, the same as options of `generate`, and its prompt."""
    words = [
        "the",
        "sea",
        "is",
        "blue",
        "and",
        "who",
        "may",
        "count",
        "its",
        "waves",
        "when",
        "one",
        "of",
        "them",
        "is",
        "gone",
        "so",
        "far",
        "away",
        "from",
        "here",
    ]
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
            try:
                await http.post("/v1/completions", json=body, timeout=0.05)
            except httpx.TimeoutException:
                pass
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
    answer = server.complete(ids, max_tokens=30, return_token_ids=True, ignore_eos=True, **{penalty: 1.5})
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


# ---------------------------------------------------------------- texts


def test_a_stream_says_what_the_whole_answer_says(server: Running, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="draftree", messages=MESSAGES, temperature=0, max_tokens=60)
    chunks = list(
        client.chat.completions.create(
            model="draftree",
            messages=MESSAGES,
            temperature=0,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_stop_strings_end_the_text_before_them(server: Running) -> None:
    whole = server.complete("Once upon a time", max_tokens=60)["choices"][0]["text"]
    middle = whole[len(whole) // 2 : len(whole) // 2 + 5]
    wanted = whole[: whole.index(middle)]
    cut = server.complete("Once upon a time", max_tokens=60, stop=[middle, "never said"])
    assert cut["choices"][0]["text"] == wanted
    assert cut["choices"][0]["finish_reason"] == "stop"
    kept = server.complete("Once upon a time", max_tokens=60, stop=middle, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == wanted + middle
    chunks = server.events("/v1/completions", prompt="Once upon a time", temperature=0, max_tokens=60, stop=middle)
    assert "".join(c["choices"][0]["text"] for c in chunks) == wanted
    assert server.idle()


def test_several_prompts_and_several_answers(server: Running) -> None:
    one, two = (server.complete(p, max_tokens=8)["choices"][0]["text"] for p in ("The sea", "A man"))
    both = server.complete(["The sea", "A man"], max_tokens=8, n=2)
    assert [c["text"] for c in both["choices"]] == [one, one, two, two]
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    drawn = server.complete("The sea", max_tokens=12, n=4, temperature=1, seed=5)["choices"]
    assert len({c["text"] for c in drawn}) > 1
    assert drawn == server.complete("The sea", max_tokens=12, n=4, temperature=1, seed=5)["choices"]


def test_best_of_gives_the_likeliest(server: Running) -> None:
    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)

    fields = {"max_tokens": 12, "temperature": 1, "seed": 3, "logprobs": 0}
    tries = server.complete("The sea", n=6, **fields)["choices"]
    best = server.complete("The sea", n=2, best_of=6, **fields)
    wanted = sorted(map(mean, tries), reverse=True)[:2]
    assert [mean(c) for c in best["choices"]] == pytest.approx(wanted)
    assert best["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in tries)


def test_echo_scores_the_prompt_as_the_model_does(server: Running, demo: Any) -> None:
    model, tokenizer = demo
    rows = [ids_of(tokenizer, "The sea is blue and wide"), ids_of(tokenizer, "word " * 300)]
    answer = server.complete(rows, max_tokens=1, echo=True, logprobs=1)
    for ids, choice in zip(rows, answer["choices"], strict=True):
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [float(logp[i, token]) for i, token in enumerate(ids[1:])]
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[0] is None
        assert scores[1 : len(ids)] == pytest.approx(wanted, abs=1e-3)
        assert len(scores) == len(ids) + 1
        assert len(choice["logprobs"]["tokens"]) == len(scores) == len(choice["logprobs"]["text_offset"])
    none = server.complete(rows[0], max_tokens=0, echo=True, logprobs=0)
    assert none["choices"][0]["text"] == tokenizer.decode(rows[0])
    assert none["usage"]["completion_tokens"] == 0


def test_chat_logprobs(server: Running, client: openai.OpenAI) -> None:
    fields: Any = {"model": "draftree", "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for token in logprobs.content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs)
        assert bytes(token.bytes or []).decode() == token.token
    streamed = [
        token
        for chunk in client.chat.completions.create(**fields, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == logprobs.content


def test_a_prediction_saves_steps_and_is_counted(server: Running, client: openai.OpenAI) -> None:
    fields: Any = {"model": "draftree", "messages": MESSAGES, "temperature": 0, "max_tokens": 48, "user": "predicts"}
    off = client.chat.completions.create(**fields, extra_body={"draftree": {"drafter": "off", "stats": True}})
    text = off.choices[0].message.content
    told = client.chat.completions.create(
        **fields, prediction={"type": "content", "content": text}, extra_body={"draftree": {"stats": True}}
    )
    assert told.choices[0].message.content == text
    steps = [answer.model_extra["draftree"]["answers"][0]["steps"] for answer in (off, told)]
    assert steps[0] == 48
    assert steps[1] < 24
    assert told.usage is not None
    details = told.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens
    assert details.accepted_prediction_tokens + (details.rejected_prediction_tokens or 0) >= 40


def test_dialogues_are_not_read_again(server: Running) -> None:
    first = server.post("/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=20, ignore_eos=True).json()
    said = first["choices"][0]["message"]["content"]
    more = [*MESSAGES, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = server.post("/v1/chat/completions", messages=more, temperature=0, max_tokens=4).json()["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]


def test_a_corpus_is_drafted_from_by_its_own_user_alone(server: Running) -> None:
    def steps(user: str) -> int:
        fields = {"user": user, "draftree": {"stats": True}, "ignore_eos": True}
        answer = server.complete("The ship went", max_tokens=40, **fields)
        return int(answer["draftree"]["answers"][0]["steps"])

    text = server.complete("The ship went", max_tokens=40, ignore_eos=True, user="reader")["choices"][0]["text"]
    learned = server.post("/v1/corpus", texts=["The ship went" + text], user="owner")
    assert learned.status_code == 200
    assert learned.json()["texts"] == 1
    assert steps("owner") < steps("stranger") - 10


def test_tokens(server: Running, demo: Any) -> None:
    tokens = server.post("/tokenize", prompt="The sea").json()
    assert tokens["tokens"] == ids_of(demo[1], "The sea")
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 2048
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": demo[1].decode(tokens["tokens"])}
    assert server.post("/tokenize", messages=MESSAGES).json()["count"] > 5
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == demo[1].eos_token
    assert info["chat_template"] == demo[1].chat_template


def test_models_health_and_info(server: Running, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["draftree"]
    assert client.models.retrieve("draftree").id == "draftree"
    listed = server.http.get("/v1/models").json()["data"][0]
    assert listed["root"] == listed["id"] == "draftree"
    assert server.http.get("/health").json() == {"status": "ok"}
    server.complete("Hello")
    info = server.http.get("/server_info").json()
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    assert info["drafter"] == "lookahead"


def test_metrics_count_what_vllms_benchmark_reads(server: Running) -> None:
    def read() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    before = read()
    answer = server.complete("The sea the sea the sea", max_tokens=40, ignore_eos=True, draftree={"stats": True})
    stats = answer["draftree"]["answers"][0]
    after = read()
    for name, count in (("drafts", "steps"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
        for prefix in ("vllm:spec_decode", "draftree"):
            key = f"{prefix}_num_{name}_total"
            assert after[key] - before[key] == stats[count]
    key = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'
    assert after[key] - before.get(key, 0) == stats["accepted_by_depth"][0]
    assert after["draftree_generated_tokens_total"] - before["draftree_generated_tokens_total"] == 40
    assert after["draftree_time_to_first_token_seconds_count"] > before["draftree_time_to_first_token_seconds_count"]
    assert after["draftree_running_requests"] == 0


# ---------------------------------------------------------------- refusals


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/completions", {"prompt": "Hi", "suffix": "there"}, "suffix"),
    ("/v1/completions", {"prompt": "Hi", "use_beam_search": True}, "use_beam_search"),
    ("/v1/completions", {"prompt": "Hi", "temperature": -1}, "temperature"),
    ("/v1/completions", {"prompt": "Hi", "temperature": "hot"}, "temperature"),
    ("/v1/completions", {"prompt": "Hi", "top_p": 0}, "top_p"),
    ("/v1/completions", {"prompt": "Hi", "n": 3, "best_of": 2}, "best_of"),
    ("/v1/completions", {"prompt": "Hi", "best_of": 2, "stream": True}, "best_of"),
    ("/v1/completions", {"prompt": "Hi", "n": 65}, "n"),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 3000}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 3000}, "prompt"),
    ("/v1/completions", {"prompt": [99999]}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": "Hi", "stop": ["x"] * 17}, "stop.list[constrained-str]"),
    ("/v1/completions", {"prompt": "Hi", "logit_bias": {"x": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "Hi", "logit_bias": {"99999": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "Hi", "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/completions", {"prompt": "Hi", "draftree": {"drafter": "medusa"}}, "draftree.drafter"),
    ("/v1/completions", {"prompt": "Hi", "draftree": {"depth": 2}}, "draftree.depth"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
    ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "json_object"}},
        "response_format.type",
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "look"}}]},
        "tools",
    ),
    ("/v1/corpus", {"texts": []}, "texts"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda v: str(v)[:60])
def test_refusals_name_the_field(server: Running, path: str, body: dict[str, Any], param: str | None) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(str(param).split(".list")[0])
    assert error["message"].endswith(".")
    assert "\n" not in error["message"]


def test_unknown_models_paths_and_methods(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # type: ignore[arg-type]
    assert raised.value.code == "model_not_found"
    assert server.http.get("/v1/nothing").json()["error"]["message"] == "There is no GET /v1/nothing here."
    assert server.http.get("/v1/completions").status_code == 405
    assert server.http.get("/v1/models/gpt-9").status_code == 404


def test_malformed_bodies_never_hurt(server: Running) -> None:
    """Two hundred bodies with something broken in each: always a 4xx, and the server lives."""
    rng = random.Random(1)
    whole = json.dumps({"prompt": "Hi", "max_tokens": 4, "stop": ["a"], "logit_bias": {"3": 1.5}, "stream": False})
    for _ in range(200):
        body, kind = bytearray(whole.encode()), rng.randrange(4)
        if kind == 0:
            body = body[: rng.randrange(len(body))]
        elif kind == 1:
            body[rng.randrange(len(body))] = rng.choice(b'\x00\xff"{}[]\\')
        elif kind == 2:
            data = json.loads(whole)
            data[rng.choice(list(data))] = rng.choice([None, {}, [], [[]], -1, 1e300, True, "\ud800", {"a": {"b": []}}])
            body = bytearray(json.dumps(data).encode())
        else:
            body = bytearray(b"[" * rng.randrange(1, 100_000))
        response = server.http.post("/v1/completions", content=bytes(body))
        assert response.status_code in (200, 400), (response.status_code, bytes(body)[:200])
    assert server.http.get("/health").status_code == 200
    assert server.idle()


# ---------------------------------------------------------------- protection


def test_keys_let_in_and_keep_apart(demo: Any) -> None:
    with serving(*demo, api_keys=("first", "second")) as server:
        assert server.http.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
            refused = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert server.http.get("/metrics", headers=headers).status_code == 401

        def ask(key: str) -> dict[str, Any]:
            body = {
                "prompt": "The sea is so wide that",
                "temperature": 0,
                "max_tokens": 30,
                "draftree": {"stats": True},
            }
            answer = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            stats: dict[str, Any] = answer.json()["draftree"]["answers"][0]
            return stats

        one, stranger, again = ask("first"), ask("second"), ask("first")
        assert one["reused_prompt_tokens"] == stranger["reused_prompt_tokens"] == 0
        assert one["steps"] == stranger["steps"] > again["steps"]
        assert again["reused_prompt_tokens"] > 0


def test_overload_is_told_and_passes(demo: Any) -> None:
    with serving(*demo, slots=2, queue=3) as server:
        statuses: list[int] = []

        def ask() -> None:
            body = {"prompt": "The sea", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
            response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            statuses.append(response.status_code)
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "queue_full"

        threads = [threading.Thread(target=ask) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 5
        assert server.idle()
        assert server.complete("Hi")["choices"]


def test_limits_of_length(demo: Any) -> None:
    with serving(*demo, max_prompt_tokens=20, max_output_tokens=10, body_bytes=2000) as server:
        assert len(server.complete([5] * 20, max_tokens=10, ignore_eos=True, return_token_ids=True)["choices"]) == 1
        assert server.post("/v1/completions", prompt=[5] * 21).status_code == 400
        assert server.post("/v1/completions", prompt=[5], max_tokens=11).status_code == 400
        chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], ignore_eos=True)
        assert chat.json()["usage"]["completion_tokens"] == 10
        assert server.post("/v1/completions", prompt="x" * 3000).status_code == 413


def test_time_is_bounded(demo: Any) -> None:
    with serving(*demo, timeout=0.2) as server:
        answer = server.complete("The sea", max_tokens=2000, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 2000
        assert server.idle()


def test_whoever_goes_away_frees_the_slot(server: Running) -> None:
    body = {"prompt": "The sea", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.2)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as stream:
        next(stream.iter_lines())
    began = time.monotonic()
    assert server.idle(5)
    assert time.monotonic() - began < 1


def test_stopping_lets_running_answers_end(demo: Any) -> None:
    found: list[httpx.Response] = []
    with serving(*demo) as server:
        body = {"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        thread = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body)))
        thread.start()
        while not server.worker.live:
            time.sleep(0.005)
    thread.join()
    assert found[0].json()["usage"]["completion_tokens"] == 300


def test_request_ids_go_around(server: Running) -> None:
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(server.http.get("/health", headers={"x-request-id": "not an id"}).headers["x-request-id"]) == 32


def test_no_prompt_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftree.serve")
    server.complete("a very private text")
    server.post("/v1/completions", prompt="a very private text", nonsense=1)
    assert "POST /v1/completions 200" in caplog.text
    assert "private" not in caplog.text


async def _async_chat(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="draftree",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
            temperature=0,
            max_tokens=20,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_the_asynchronous_client(server: Running, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="draftree", messages=MESSAGES, temperature=0, max_tokens=20)
    assert asyncio.run(_async_chat(server.url)) == whole.choices[0].message.content
