"""What the server refuses: with the name of the field, and unharmed."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest
from serve_driver import MESSAGES, Running

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
        {"messages": MESSAGES, "response_format": {"type": "grammar"}},
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


TEMPLATE_ARGUMENTS: dict[str, Any] = {
    "chat_template": "HELLO {{ 7*7 }}",
    "messages": [],
    "tokenizer": 1,
    "self": 1,
    "conversation": [],
    "conversations": [],
    "continue_final_message": True,
    "truncation": True,
    "max_length": 3,
    "padding": "max_length",
    "return_tensors": "pt",
    "return_dict": True,
    "tokenize": True,
    "tools": [],
    "documents": [],
    "add_generation_prompt": False,
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
    assert server.http.get("/v1/completions").status_code == 405
    assert server.http.get("/v1/models/gpt-9").status_code == 404


def test_malformed_bodies_never_hurt(server: Running) -> None:
    """Two thousand bodies with something changed in each: a 4xx, or an answer where it is still a request."""
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
    for _ in range(2000):
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
    assert refused > 1200
    assert server.http.get("/health").status_code == 200
    assert server.idle()
