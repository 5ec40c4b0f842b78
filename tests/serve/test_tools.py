"""Calls, roles and first chunks of chats, as clients have them."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import httpx
import pytest
from serve_driver import MESSAGES, Running, serving
from tool_chat import TOOL, Talker

from draftree.serve.chat import MessageReader, chat_prompt
from draftree.serve.protocol import Chat, Message


@pytest.mark.parametrize("written", ['{"x": 1e999}', '"no json"', '"[1]"', "NaN", '"{\\"x\\": NaN}"'])
def test_arguments_that_are_no_object_of_json_are_no_call(written: str) -> None:
    said = f'<call>{{"name": "look", "arguments": {written}}}</call>'
    read = MessageReader(Talker(), [ord(c) for c in "user: Hi\nA: "], [TOOL]).feed(said, last=True)
    assert (read.calls, read.content) == ([], said)


@pytest.mark.parametrize("written", ['{"x": 1.5}', '"{\\"x\\": 1.5}"'])
def test_arguments_in_a_string_are_arguments(written: str) -> None:
    said = f'<call>{{"name": "look", "arguments": {written}}}</call>'
    read = MessageReader(Talker(), [ord(c) for c in "user: Hi\nA: "], [TOOL]).feed(said, last=True)
    assert json.loads(read.calls[0]["function"]["arguments"]) == {"x": 1.5}


def shown(demo: Any, template: str, *messages: dict[str, Any]) -> str:
    """What a template makes of messages."""
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    return str(tokenizer.decode(chat_prompt(tokenizer, [Message.model_validate(one) for one in messages])))


def test_a_developer_is_a_system_where_the_template_knows_none(demo: Any) -> None:
    messages = [{"role": role, "content": "."} for role in ("developer", "user")]
    assert shown(demo, "{{ m.role }}", *messages) == "systemuser"
    known = "{% if m.role == 'developer' %}{% endif %}{{ m.role }}"
    assert shown(demo, known, *messages) == "developeruser"


def test_a_call_without_arguments_comes_back(demo: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": ""}}
    said = {"role": "assistant", "tool_calls": [call]}
    assert shown(demo, "{{ m.tool_calls[0].function.arguments | tojson }}", said) == "{}"


def test_fields_that_are_null_ask_for_nothing() -> None:
    unused = "audio function_call functions metadata prompt_cache_key reasoning_effort safety_identifier verbosity"
    body = {"messages": MESSAGES} | dict.fromkeys([*unused.split(), "web_search_options"])
    assert Chat.model_validate(body).messages[0].content == MESSAGES[0]["content"]


def test_the_first_chunk_does_not_come_while_the_answer_waits(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take it for the first token."""
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "ignore_eos": True, "draftree": {"drafter": "off"}}
    with serving(*demo, slots=1) as server:
        engine, path = server.worker.engine, f"{server.url}/v1/chat/completions"
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.01), step()))
        with httpx.stream("POST", path, json=body | {"max_tokens": 40}) as first:
            lines = first.iter_lines()
            next(lines)
            with httpx.stream("POST", path, json=body | {"max_tokens": 2}) as second:
                chunks = (json.loads(line[6:]) for line in second.iter_lines() if line.startswith("data: {"))
                begins = next(chunks)["choices"][0]["delta"]
                waiting = len(engine.waiting)
                assert len(list(lines)) > 40
        assert begins["role"] == "assistant"
        assert waiting == 0, "it has a slot by then"


def test_options_that_leave_no_token_are_the_client_s_own_fault(server: Running, demo: Any) -> None:
    every = list(range(len(demo.tokenizer)))
    asked = {"prompt": "a", "stop_token_ids": every, "min_tokens": 2, "max_tokens": 3, "temperature": 1.0}
    answer = server.post("/v1/completions", **asked)
    assert answer.status_code == 400
    assert "No token has a probability" in answer.json()["error"]["message"]
    assert server.idle()
