"""/v1/responses by the official client: text, streams, schemas, and a round trip of reasoning and tool calls."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from serve_driver import Running, serving
from tool_chat import Script
from transformers import AddedToken

from draftree.serve import calls, respond

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}
ASKED: dict[str, Any] = {"model": "draftree", "temperature": 0}


@pytest.fixture(scope="module")
def qwen(demo: Any) -> Iterator[Running]:
    """A server whose tokenizer has Qwen 3's markers, which are tokens and not special."""
    tokenizer = copy.deepcopy(demo.tokenizer)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer.chat_template = TEMPLATE
    model = copy.deepcopy(demo.model)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with serving(model, tokenizer) as running:
        yield running


@pytest.fixture
def client(qwen: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def say(qwen: Running, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tokenizer = qwen.app.state.server.tokenizer
    monkeypatch.setattr(calls, "_penalties", lambda body, prompt: [Script(tokenizer, prompt, text)])


SAID = (
    '<think>\nLet me\n\nsee.\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at": 5}}\n</tool_call>'
)


def test_a_round_trip_of_reasoning_and_calls(
    qwen: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(qwen, monkeypatch, SAID)
    said = client.responses.create(**ASKED, input="Where?", tools=[LOOK], tool_choice="auto", parallel_tool_calls=True)
    kinds = [item.type for item in said.output]
    assert kinds == ["reasoning", "message", "function_call"]
    assert (said.status, said.output_text) == ("completed", "I look.")
    reasoning, _, call = said.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Let me\n\nsee."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": 5})
    assert said.usage is not None
    assert 0 < said.usage.output_tokens_details.reasoning_tokens < said.usage.output_tokens

    streamed = list(client.responses.create(**ASKED, input="Where?", tools=[LOOK], stream=True))
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    last = streamed[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == kinds
    for kind, text in (("reasoning_text", "Let me\n\nsee."), ("output_text", "I look.")):
        pieces = [event.delta for event in streamed if event.type == f"response.{kind}.delta"]  # type: ignore[union-attr]
        assert "".join(pieces) == text  # type: ignore[arg-type]
    with client.responses.stream(**ASKED, input="Where?", tools=[LOOK]) as stream:
        assert stream.get_final_response().output_text == "I look."

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A sail."}
    prompts: list[str] = []
    chat_prompt = calls.chat_prompt
    monkeypatch.setattr(
        calls, "chat_prompt", lambda *a, **b: (ids := chat_prompt(*a, **b), prompts.append(a[0].decode(ids[0])))[0]
    )
    say(qwen, monkeypatch, "A sail, far off.")
    history: Any = [{"role": "user", "content": "Where?"}, *said.output, result]
    again = client.responses.create(**ASKED, input=history, instructions="Be kind.", tools=[LOOK])
    assert again.output_text == "A sail, far off."
    assert [part.strip() for part in prompts[0].split("<|im_start|>")[1:]] == [
        "system\nBe kind.",
        "user\nWhere?",
        "assistant\n<think>Let me\n\nsee.</think>I look."
        '<tool_call>{"name": "look", "arguments": {"at": 5}}</tool_call>',
        "tool\nA sail.",
        "assistant",
    ]


def test_schemas_lengths_and_fields_without_effect(qwen: Running, client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: Literal["Anna", "Ben"]
        old: bool

    parsed = client.responses.parse(**ASKED, input="Who?", text_format=Person).output_parsed
    assert isinstance(parsed, Person)
    unused: Any = {
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    raw = client.responses.with_raw_response.create(**ASKED, input="Who?", max_output_tokens=3, **unused)
    assert set(raw.headers["x-draftree-ignored"].split(", ")) == {
        *("store", "include", "reasoning_effort", "reasoning.summary")
    }
    short = raw.parse()
    assert (short.status, short.store) == ("incomplete", False)
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
    ({"max_output_tokens": 30000}, "max_output_tokens", "lower max_output_tokens"),
    ({"input": "sea " * 3000}, "input", "shorten it"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice", "there are no tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "give one with a schema"),
    ({"conversation": "x"}, "conversation", "not supported here"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "'message'"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_refusals(qwen: Running, fields: dict[str, Any], param: str, words: str) -> None:
    response = qwen.post("/v1/responses", **{"input": "Hi"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


def test_an_error_in_a_stream(qwen: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "message_parts", lambda call, delta: 1 / 0)
    *_, last = client.responses.create(**ASKED, input="Hi", max_output_tokens=4, stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "its log says why" in last.response.error.message
    assert qwen.idle()
