"""The server under the OpenAI API: texts, streams, scores, tokens."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from serve_driver import MESSAGES, Running, ids_of, serving

from draftree import Fixed
from draftree.by_name import make_drafter
from draftree.engine.passes import score_prompt
from draftree.serve.output import TokenBytes


def test_a_stream_equals_the_whole_answer(server: Running, client: openai.OpenAI) -> None:
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
    with server.http.stream("POST", "/v1/completions", json={"prompt": "The", "max_tokens": 2, "stream": True}) as sent:
        assert sent.headers["x-accel-buffering"] == "no", "else nginx hands out an answer in lumps"


def test_messages_of_the_client_are_accepted_in_the_history(client: openai.OpenAI) -> None:
    """Fields of an answer may be null, and annotations may be empty."""
    asked: Any = {"model": "draftree", "temperature": 0, "max_tokens": 8}
    message = client.chat.completions.create(messages=MESSAGES, **asked).choices[0].message
    held: Any = message.model_dump()
    assert held["function_call"] is None
    more: Any = {"role": "user", "content": "And then?"}
    found = [
        client.chat.completions.create(messages=[*MESSAGES, one, more], **asked).choices[0].message.content
        for one in ({"role": "assistant", "content": message.content}, held, held | {"annotations": []})
    ]
    assert found[0] == found[1] == found[2]


def test_stop_strings_end_the_text(server: Running) -> None:
    whole = server.complete("Once upon a time", max_tokens=60)["choices"][0]["text"]
    middle = whole[len(whole) // 2 : len(whole) // 2 + 5]
    expected = whole[: whole.index(middle)]
    cut = server.complete("Once upon a time", max_tokens=60, stop=[middle, "never said"])
    assert cut["choices"][0]["text"] == expected
    assert cut["choices"][0]["finish_reason"] == "stop"
    kept = server.complete("Once upon a time", max_tokens=60, stop=middle, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == expected + middle
    chunks = server.events("/v1/completions", prompt="Once upon a time", temperature=0, max_tokens=60, stop=middle)
    assert "".join(c["choices"][0]["text"] for c in chunks) == expected
    assert server.idle()


def test_stop_strings_after_min_tokens(server: Running, demo: Any) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    whole = server.complete("Once upon a time", **fields)["choices"][0]
    assert "e" in demo[1].decode(whole["token_ids"][:20])
    early = len(demo[1].decode(whole["token_ids"][:20]))
    cut = server.complete("Once upon a time", **fields, min_tokens=20, stop=["e"])["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index("e", early)]
    assert cut["finish_reason"] == "stop"
    assert len(cut["token_ids"]) > 20


def test_very_low_temperatures_are_greedy(server: Running) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "return_token_ids": True}
    constrained = fields | {"structured_outputs": {"regex": "[a-z ]{9,30}"}}
    for asked in (fields, constrained):
        greedy = server.complete("The sea", temperature=0, **asked)["choices"]
        for temperature in (1e-40, 1e-300, 9e-6):
            assert server.complete("The sea", temperature=temperature, seed=3, **asked)["choices"] == greedy
    refused = server.post("/v1/completions", prompt="The sea", repetition_penalty=1e-310)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "repetition_penalty"


def test_several_prompts_and_several_answers(server: Running) -> None:
    one, two = (server.complete(p, max_tokens=8)["choices"][0]["text"] for p in ("The sea", "A man"))
    both = server.complete(["The sea", "A man"], max_tokens=8, n=2)
    assert [c["text"] for c in both["choices"]] == [one, one, two, two]
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    drawn = server.complete("The sea", max_tokens=12, n=4, temperature=1, seed=5)["choices"]
    assert len({c["text"] for c in drawn}) > 1
    assert drawn == server.complete("The sea", max_tokens=12, n=4, temperature=1, seed=5)["choices"]


def test_scores_of_the_prompt_equal_the_model_s(server: Running, demo: Any) -> None:
    model, tokenizer = demo
    rows = [ids_of(tokenizer, "The sea is blue and wide"), ids_of(tokenizer, "word " * 300)]
    answer = server.complete(rows, max_tokens=1, echo=True, logprobs=1)
    for ids, choice in zip(rows, answer["choices"], strict=True):
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [float(logp[i, token]) for i, token in enumerate(ids[1:])]
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[0] is None
        assert scores[1 : len(ids)] == pytest.approx(expected, abs=1e-3)
        assert len(scores) == len(ids) + 1
        assert len(choice["logprobs"]["tokens"]) == len(scores) == len(choice["logprobs"]["text_offset"])
    none = server.complete(rows[0], max_tokens=0, echo=True, logprobs=0)
    assert none["choices"][0]["text"] == tokenizer.decode(rows[0])
    assert none["usage"]["completion_tokens"] == 0


def test_a_stream_of_the_prompt_only(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": ["The sea", "A man"], "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = server.complete(**asked, draftree={"stats": True})
    assert whole["draftree"] == {"answers": []}
    events = server.events("/v1/completions", **asked, stream_options={"include_usage": True})
    assert events.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        said, ended = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert (said["text"], said["logprobs"]) == (choice["text"], choice["logprobs"])
        assert (ended["text"], ended["finish_reason"]) == ("", choice["finish_reason"])


def test_bytes_and_offsets_of_parts_of_characters(server: Running, demo: Any) -> None:
    ids = ids_of(demo[1], "\U0001f642\xe9!")
    assert len(ids) == 6
    fields = {"echo": True, "logprobs": 0, "max_tokens": 3}
    scored = server.complete(ids, **fields)["choices"][0]
    assert scored["logprobs"]["text_offset"][:7] == [0, 0, 0, 0, 1, 2, 3]
    assert scored["logprobs"]["tokens"][:6] == [*(rf"bytes:\x{n}" for n in ("f0", "9f", "99", "82")), "\xe9", "!"]
    tops = server.complete(ids, **fields | {"logprobs": 20})["choices"][0]["logprobs"]
    keys = [top.keys() for top in tops["top_logprobs"][1:]]
    assert all(len(found) in (20, 21) for found in keys), "no token hides another"
    assert all(token in found for token, found in zip(tops["tokens"][1:], keys, strict=True))
    chunks = server.events("/v1/completions", prompt=ids, temperature=0, **fields)
    assert [at for c in chunks for at in c["choices"][0]["logprobs"]["text_offset"]] == scored["logprobs"][
        "text_offset"
    ]
    forced = {"logit_bias": {str(ids[0]): 100}, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    answer = server.post("/v1/chat/completions", messages=MESSAGES, **forced).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xF0]


def test_bytes_of_tokens_join_to_those_of_the_text(demo: Any) -> None:
    text, tokenizer = "Gr\xfc\xdfe \u4f60\u597d \U0001f642\n\ttoo", demo[1]
    found = TokenBytes(tokenizer)
    assert bytes(b for token in ids_of(tokenizer, text) for b in found.of(token)).decode().strip() == text
    assert bytes(found.of(tokenizer.eos_token_id)).decode() == tokenizer.eos_token

    class Other:
        """Stand for a tokenizer whose tokens are characters."""

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

        def convert_ids_to_tokens(self, token: int) -> str:
            return chr(token)

        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    assert TokenBytes(Other()).of(0xE9) == list("\xe9".encode())


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


@pytest.mark.parametrize("name", ["lookahead", "medusa+prompt-lookup"])
def test_a_prediction_saves_steps_and_is_counted(demo: Any, name: str) -> None:
    fields: Any = {"model": "draftree", "messages": MESSAGES, "temperature": 0, "max_tokens": 48, "user": "predicts"}
    drafter = make_drafter(name, demo.tokenizer, demo.model)
    with serving(*demo, drafter, shape=Fixed(8)) as server:  # Times of steps do not matter.
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
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


def test_a_prediction_needs_a_copying_drafter(demo: Any) -> None:
    with serving(*demo, make_drafter("medusa", demo.tokenizer, demo.model)) as server:
        prediction = {"type": "content", "content": "The sea"}
        answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, prediction=prediction)
    assert answer.status_code == 400
    assert "does not use predictions" in answer.json()["error"]["message"]


def test_dialogues_reuse_the_cache(server: Running) -> None:
    first = server.post("/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=20, ignore_eos=True).json()
    said = first["choices"][0]["message"]["content"]
    more = [*MESSAGES, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = server.post("/v1/chat/completions", messages=more, temperature=0, max_tokens=4).json()["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]


def test_cached_tokens_count_once_for_several_answers(server: Running) -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    for _ in range(2):  # the last token is read each time
        used = server.complete(prompt, n=4, max_tokens=2, user="several")["usage"]
        assert used["prompt_tokens"] == 8
        assert used["prompt_tokens_details"]["cached_tokens"] <= 7
    assert used["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_corpus_serves_its_own_user_only(demo: Any) -> None:
    with serving(*demo, shape=Fixed(8)) as server:  # Times of steps do not matter.

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


def test_models_health_and_info(server: Running, client: openai.OpenAI, demo: Any) -> None:
    assert [m.id for m in client.models.list()] == ["draftree"]
    assert client.models.retrieve("draftree").id == "draftree"
    listed = server.http.get("/v1/models").json()["data"][0]
    assert listed["root"] == listed["id"] == "draftree"
    with serving(*demo, root="them/model") as other:
        assert other.http.get("/v1/models").json()["data"][0]["root"] == "them/model"
        asked = [
            other.post("/v1/completions", model=name, prompt=[5], max_tokens=1) for name in ("them/model", "draftree")
        ]
        assert [answer.status_code for answer in asked] == [200, 200]
    assert server.http.get("/health").json() == {"status": "ok"}
    server.complete("Hello")
    info = server.http.get("/server_info").json()
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    assert info["drafter"] == "lookahead"


def test_the_curl_commands_of_the_page(server: Running) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = re.findall(r"^curl -s localhost:8000(\S+) -d '([^']*)'", text, re.M)
    assert lines
    for path, body in lines:
        response = server.http.post(path, content=body)
        assert response.status_code == 200, response.text
        assert response.json()["draftree"]["answers"][0]["steps"]


def test_trees_of_the_steps(server: Running) -> None:
    fields = {"prompt": "The sea the sea the sea", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = server.complete(**fields, return_token_ids=True, draftree={"trees": True})["choices"][0]
    told = whole["draftree"]
    assert "".join(told["pieces"]) == whole["text"]
    assert len(told["drafters"]) == 30
    assert any(told["drafters"])
    assert "".join(token for tree in told["trees"] for token in tree["emitted"]) == whole["text"]
    for tree in told["trees"]:
        assert tree["parents"][0] == -1
        assert all(parent < node for node, parent in enumerate(tree["parents"]))
        assert tree["accepted"][0] == 0
        assert [tree["tokens"][node] for node in tree["accepted"][1:]] == tree["emitted"][: len(tree["accepted"]) - 1]
        assert all(tree["drafters"][node] for node in range(1, len(tree["tokens"])))
    chunks = server.events("/v1/completions", **fields, draftree={"trees": True})
    streamed = [tree for chunk in chunks for choice in chunk["choices"] for tree in choice["draftree"]["trees"]]
    assert "".join(token for tree in streamed for token in tree["emitted"]) == whole["text"]


SCORED: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1}


def test_each_prompt_is_scored_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []

    def spied(runner: Any, prompt: Any, count: int, cache: Any) -> Any:
        prompts.append(prompt)
        return score_prompt(runner, prompt, count, cache)

    monkeypatch.setattr("draftree.serve.worker.score_prompt", spied)
    rows, fields = [[5, 6, 7], [8, 9]], {"echo": True, "logprobs": 1, "max_tokens": 2}
    several = server.complete(rows, n=3, **fields)["choices"]
    assert prompts == rows
    alone = [server.complete(row, **fields)["choices"][0]["logprobs"] for row in rows]
    assert [choice["logprobs"] for choice in several] == [alone[0]] * 3 + [alone[1]] * 3


def test_time_is_bounded(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": [[5] * 2000] * 8, **SCORED}
    began = time.monotonic()
    late = server.post("/v1/completions", **asked, draftree={"timeout": 0.05})
    assert time.monotonic() - began < 5, "all of them take longer"
    assert late.status_code == 400
    assert late.json()["error"]["code"] == "timeout"
    assert "draftree.timeout" in late.json()["error"]["message"]
    assert server.idle(1)
    assert server.post("/v1/completions", prompt=[5, 6], **SCORED).status_code == 200


def test_a_client_that_disconnects_ends_its_scoring(server: Running) -> None:
    asked = {"prompt": [[5] * 2000] * 64, **SCORED}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=asked, timeout=0.5)
    assert server.idle(2)


def test_prompts_to_score_count_in_the_queue(demo: Any) -> None:
    with serving(*demo, slots=2, queue=3) as server:
        assert server.post("/v1/completions", prompt=[[5, 6]] * 6, **SCORED).status_code == 400
        assert server.post("/v1/completions", prompt=[[5, 6]] * 5, **SCORED).status_code == 200
