"""What the server refuses: with the name of the field, and unharmed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from serve_driver import MESSAGES, Running, serving

from draftree.serve.grammars import _arguments_of

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
LOOK = {"type": "function", "function": {"name": "look"}}
SAID = [{"role": "user", "content": "Hi"}]
DEEP = "[" * 100_000
CALL = {"id": "x", "type": "function", "function": {"name": "look", "arguments": DEEP}}
CALLED = [*SAID, {"role": "assistant", "tool_calls": [CALL]}]
# Path, body, the field that is named, and words of the sentence.
REFUSED: list[tuple[str, Any, str | None, str]] = [
    (PLAIN, [], None, "no JSON object"),
    (PLAIN, {}, "prompt", "is missing"),
    (PLAIN, {"prompt": "Hi", "suffix": "there"}, "suffix", "not supported here"),
    (PLAIN, {"prompt": "Hi", "use_beam_search": True}, "use_beam_search", "There is no field"),
    (PLAIN, {"prompt": "Hi", "temperature": -1}, "temperature", "greater than or equal to 0"),
    (PLAIN, {"prompt": "Hi", "temperature": "hot"}, "temperature", "a valid number"),
    (PLAIN, {"prompt": "Hi", "top_p": 0}, "top_p", "greater than 0"),
    (PLAIN, {"prompt": "Hi", "best_of": 2}, "best_of", "should be 1"),
    (PLAIN, {"prompt": "Hi", "n": 65}, "n", "asks for 65 answers"),
    (PLAIN, {"prompt": ["Hi"] * 33, "n": 2}, "n", "asks for 66 answers"),
    (PLAIN, {"prompt": ["Hi"] * 65}, "prompt", "asks for 65 answers"),
    (PLAIN, {"prompt": "Hi", "max_tokens": 0}, "max_tokens", "at least 1"),
    (PLAIN, {"prompt": "Hi", "max_tokens": 3000}, "max_tokens", "lower max_tokens"),
    (PLAIN, {"prompt": "Hi", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most 4"),
    (PLAIN, {"prompt": "Hi", "min_tokens": 17}, "min_tokens", "at most 16"),
    (PLAIN, {"prompt": [5] * 3000, "max_tokens": 5}, "prompt", "shorten it"),
    (PLAIN, {"prompt": [99999]}, "prompt", "99999"),
    (PLAIN, {"prompt": []}, "prompt", "The prompt is empty"),
    (PLAIN, {"prompt": 5}, "prompt", "a valid string or a valid array"),
    (PLAIN, {"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
    (PLAIN, {"prompt": ["Hi", 5]}, "prompt.1", "a valid string"),
    (PLAIN, {"prompt": [[5]], "add_special_tokens": True}, "add_special_tokens", "the prompt is token ids"),
    (PLAIN, {"prompt": [[5], [-1]]}, "prompt.1.0", "greater than or equal to 0"),
    (PLAIN, {"prompt": "Hi", "stop": ["x"] * 17}, "stop", "at most 16 items"),
    (PLAIN, {"prompt": "Hi", "stop": ["x", ""]}, "stop.1", "at least 1 character"),
    (PLAIN, {"prompt": "Hi", "stop": ""}, "stop", "at least 1 character"),
    (PLAIN, {"prompt": "Hi", "stop_token_ids": [5, 99999]}, "stop_token_ids", "names token 99999"),
    (PLAIN, {"prompt": "Hi", "logit_bias": {"x": 1}}, "logit_bias", "names token 'x'"),
    (PLAIN, {"prompt": "Hi", "logit_bias": {"99999": 1}}, "logit_bias", "names token '99999'"),
    (PLAIN, {"prompt": "Hi", "logit_bias": {"1": 1, "01": 2}}, "logit_bias", "names token '01'"),
    (PLAIN, {"prompt": "Hi", "logit_bias": {"1" * 5000: 1}}, "logit_bias", "names token '111"),
    (PLAIN, {"prompt": "Hi", "structured_outputs": {"json": DEEP}}, "structured_outputs", "The schema is no JSON"),
    (PLAIN, {"prompt": "Hi", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    (PLAIN, {"prompt": "Hi", "stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
    (PLAIN, {"prompt": "Hi", "draftree": {"drafter": "medusa"}}, "draftree.drafter", "give 'off' or 'lookahead'"),
    (
        PLAIN,
        {"prompt": "Hi", "draftree": {"drafter": "off", "node_budget": 4}},
        "draftree.node_budget",
        "nothing drafts",
    ),
    (PLAIN, {"prompt": "Hi", "draftree": {"depth": 2}}, "draftree.depth", "There is no field"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role", "'system'"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a valid string or a valid array"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages.0.content.0.type",
        "is no text and no image_url",
    ),
    (CHAT, {"messages": [*SAID, {"role": "assistant", "refusal": "No."}]}, "messages.1.refusal", "leave it out"),
    (CHAT, {"messages": [{"role": "user", "content": "sea " * 3000}]}, "messages", "shorten it"),
    (CHAT, {"messages": CALLED}, "messages", "The arguments of a tool call in the messages are no JSON"),
    ("/tokenize", {"messages": CALLED}, "messages", "The arguments of a tool call in the messages are no JSON"),
    (CHAT, {"messages": SAID, "max_tokens": 3000}, "max_tokens", "lower max_tokens"),
    (CHAT, {"messages": SAID, "max_completion_tokens": 3000}, "max_completion_tokens", "lower max_completion_tokens"),
    (CHAT, {"messages": SAID, "max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "at most 3"),
    (CHAT, {"messages": SAID, "top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
    (CHAT, {"messages": SAID, "max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "give one of them"),
    (CHAT, {"messages": SAID, "response_format": {"type": "grammar"}}, "response_format.type", "'json_schema'"),
    (CHAT, {"messages": SAID, "tools": [LOOK]}, "tools", "knows no tools"),
    (CHAT, {"messages": SAID, "tool_choice": "x"}, "tool_choice", "'none', 'auto' or 'required'"),
    (CHAT, {"messages": SAID, "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
    (CHAT, {"messages": SAID, "tool_choice": "auto"}, "tool_choice", "there are no tools"),
    (CHAT, {"messages": SAID, "tool_choice": LOOK}, "tool_choice", "there are no tools"),
    (CHAT, {"messages": SAID, "parallel_tool_calls": True, "tools": []}, "parallel_tool_calls", "there are no tools"),
    (
        CHAT,
        {"messages": SAID, "prediction": {"type": "content", "content": "Hi"}, "draftree": {"drafter": "off"}},
        "prediction",
        "the drafter is off",
    ),
    (
        CHAT,
        {"messages": SAID, "prediction": {"type": "content", "content": "sea " * 3000}},
        "prediction",
        "The prediction has",
    ),
    ("/v1/corpus", {"texts": []}, "texts", "at least 1 item"),
    ("/tokenize", {"prompt": "a", "messages": SAID}, "prompt", "one of both"),
    (
        "/tokenize",
        {"messages": SAID, "add_special_tokens": False},
        "add_special_tokens",
        "leave add_special_tokens out",
    ),
    (
        "/tokenize",
        {"prompt": "a", "add_generation_prompt": True},
        "add_generation_prompt",
        "leave add_generation_prompt out",
    ),
    ("/tokenize", {"prompt": "sea " * 3000}, "prompt", "shorten it"),
    ("/tokenize", {"messages": [{"role": "user", "content": "sea " * 3000}]}, "messages", "shorten it"),
    ("/detokenize", {"tokens": [99999]}, "tokens", "no token 99999"),
    ("/detokenize", {"tokens": [5] * 3000}, "tokens", "shorten it"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), REFUSED, ids=lambda v: str(v)[:60])
def test_refusals_name_the_field(server: Running, path: str, body: Any, param: str | None, words: str) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert error["message"].endswith(".")
    assert "\n" not in error["message"]


def test_fields_without_effect_are_accepted(server: Running) -> None:
    """Fields without a meaning for this request, which clients send with every request."""
    said = [*SAID, {"role": "assistant", "content": "Hi.", "refusal": None}, *SAID]
    answer = server.post(CHAT, messages=said, max_tokens=2, tool_choice="none", tools=None, stop=[])
    assert answer.status_code == 200, answer.text


UNUSED: dict[str, Any] = {
    "metadata": {"trace": "7"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "a",
    "safety_identifier": "b",
}


def test_fields_that_cannot_change_the_text_are_named_in_a_header(server: Running, demo: Any) -> None:
    plain = server.post(CHAT, messages=SAID, max_tokens=4, temperature=0)
    given = UNUSED | {"reasoning_effort": "low"}
    answer = server.post(CHAT, messages=SAID, max_tokens=4, temperature=0, user=None, **given)
    assert answer.json()["choices"] == plain.json()["choices"]
    assert "x-draftree-ignored" not in plain.headers
    assert set(answer.headers["x-draftree-ignored"].split(", ")) == given.keys()
    completed = server.post(PLAIN, prompt="Hi", stream=True, **UNUSED)
    assert set(completed.headers["x-draftree-ignored"].split(", ")) == UNUSED.keys()
    assert server.post(CHAT, messages=SAID, verbosity="low").json()["error"]["param"] == "verbosity"
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }} {{ reasoning_effort }}: "
    with serving(demo.model, tokenizer) as thinker:
        read = thinker.post(CHAT, messages=SAID, max_tokens=1, reasoning_effort="low", return_token_ids=True)
        assert tokenizer.decode(read.json()["choices"][0]["prompt_token_ids"]).strip() == "Hi low:"
        assert "x-draftree-ignored" not in read.headers


def test_parsed_fields_of_the_official_client_are_accepted(server: Running) -> None:
    class Named(BaseModel):
        name: Literal["Anna"]

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked: Any = {"model": "draftree", "messages": MESSAGES, "temperature": 0}
    parsed = client.chat.completions.parse(**asked, response_format=Named).choices[0].message
    with client.chat.completions.stream(**asked, response_format=Named) as stream:
        streamed = stream.get_final_completion().choices[0].message
    called = [CALL | {"index": 0, "function": {"name": "look", "arguments": "{}", "parsed_arguments": {"a": 1}}}]
    held: Any = {"role": "assistant", "content": None, "parsed": None, "tool_calls": called}
    for message in (parsed, parsed.model_dump(), streamed, streamed.model_dump(), held):
        said: Any = [*MESSAGES, message, *MESSAGES]
        assert client.chat.completions.create(model="draftree", messages=said, max_tokens=2).choices


def test_more_answers_than_there_are_places_are_refused_and_never_put_off(demo: Any) -> None:
    with serving(*demo, slots=2, queue=3) as server:
        assert len(server.complete("Hi", n=5, max_tokens=1)["choices"]) == 5
        asked: list[tuple[dict[str, Any], str]] = [
            ({"prompt": "Hi", "n": 6}, "n"),
            ({"prompt": ["Hi"] * 6}, "prompt"),
        ]
        for body, param in asked:
            refused = server.http.post(PLAIN, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
            assert "at most 5" in refused.json()["error"]["message"]


TEMPLATE_ARGUMENTS: dict[str, Any] = {
    "chat_template": "HELLO {{ 7*7 }}",
    "messages": [],
    "continue_final_message": True,
    "truncation": True,
    "tools": [],
}


@pytest.mark.parametrize("name", TEMPLATE_ARGUMENTS)
def test_only_variables_reach_the_chat_template(server: Running, name: str) -> None:
    given = {"enable_thinking": False, "options": 1, name: TEMPLATE_ARGUMENTS[name]}
    refused = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, chat_template_kwargs=given)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == f"chat_template_kwargs.{name}"
    assert refused.json()["error"]["message"].endswith("leave it out.")
    del given[name]
    taken = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, chat_template_kwargs=given)
    assert taken.status_code == 200, taken.text


def test_unknown_models_paths_and_methods(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # type: ignore[arg-type]
    assert raised.value.code == "model_not_found"
    assert server.http.get("/v1/nothing").json()["error"]["message"] == "There is no GET /v1/nothing here."
    for path in ("/tokenize", "/detokenize"):
        given = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
        assert server.post(path, model="gpt-9", **given).json()["error"]["code"] == "model_not_found"
        assert server.post(path, model="draftree", **given).status_code == 200
    wrong = server.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    health = server.http.head("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert server.http.get("/v1/models/gpt-9").status_code == 404


def test_malformed_bodies_never_hurt(server: Running) -> None:
    """Change something in each of 500 bodies: the response is a 400, or an answer if the body is still valid."""
    rng, refused = random.Random(1), 0
    fields: dict[str, Any] = {"max_tokens": 2, "stop": ["a"], "logit_bias": {"3": 1.5}, "stream": False, "seed": 3}
    asked = {
        "/v1/completions": json.dumps({"prompt": "Hi", **fields}),
        "/v1/chat/completions": json.dumps(
            {
                "messages": MESSAGES,
                "tools": [],
                "response_format": {"type": "text"},
                "draftree": {"stats": True},
                **fields,
            }
        ),
    }
    for _ in range(500):
        path, whole = rng.choice(list(asked.items()))
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
        response = server.http.post(path, content=bytes(body))
        assert response.status_code in (200, 400), (response.status_code, bytes(body)[:200])
        refused += response.status_code == 400
    assert refused > 300
    assert server.http.get("/health").status_code == 200
    assert server.idle()


def test_forms_of_other_sites_are_refused(server: Running) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 2})
    page = {"Origin": "https://elsewhere.example"}
    for kind, headers, status in (
        ("text/plain", page, 415),
        ("application/x-www-form-urlencoded", page, 415),
        ("application/json; charset=utf-8", page, 200),
        ("application/x-www-form-urlencoded", {}, 200),  # curl -d
    ):
        answer = server.http.post(PLAIN, content=body, headers={"Content-Type": kind, **headers})
        assert answer.status_code == status, (kind, answer.text)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"properties": {"a": {"enum": [1]}}}, {"type": "object", "properties": {"a": {"enum": [1]}}}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, None),
        ({"type": "object"}, None),
        ({}, {"type": "object"}),
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
    ],
)
def test_arguments_are_objects_where_their_schema_does_not_say_it(parameters: Any, expected: Any) -> None:
    function = {"name": "f"} | ({} if parameters is None else {"parameters": parameters})
    assert _arguments_of(function, forced=True) == (expected or parameters)
