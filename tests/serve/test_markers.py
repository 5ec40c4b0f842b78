"""Structured output of models whose markers are single tokens, special to Hugging Face or not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from drafters_for_tests import RandomTree
from real_tokenizers import real_tokenizer
from serve_driver import MESSAGES, serving
from tool_chat import LOOK, TOOLS, says, scripted

from benchmarks.machine.schemas import record
from draftree import GrammarDrafter, Lookahead, Merge
from draftree.serve.settings import ApiError
from draftree.serve.templates import FORMS, with_template

QWEN = (
    "{% for tool in tools or [] %}{{ tool.function.name }} <tool_call>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> #}"
)
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": record(city={"type": "string"})}}


@pytest.fixture(scope="module", params=["no tokens", "texts", "special tokens", "qwen3"])
def tokenizer(request: Any, demo: Any) -> Any:
    if request.param == "qwen3":
        return with_template(real_tokenizer("qwen3"))
    made = copy.deepcopy(demo.tokenizer)
    made.chat_template = QWEN
    if request.param != "no tokens":
        made.add_tokens(MARKERS, special_tokens=request.param == "special tokens")
    return with_template(made)


ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "strict": (f"Sure.\n{CALL}", {"tools": TOOLS}, {"content": "Sure.", "calls": 1}),
    "one call": (
        f"Sure.\n{CALL}\n{CALL}",
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"content": "Sure.", "calls": 1},
    ),
    "required": (CALL, {"tools": TOOLS, "tool_choice": "required"}, {"content": None, "calls": 1}),
    "required, after reasoning": (
        f"<think>\nThe sea.\n</think>\n\n{CALL}",
        {"tools": TOOLS, "tool_choice": "required"},
        {"content": None, "calls": 1, "reasoning": "The sea."},
    ),
    "schema": (
        '<think>\nIs it so? {"no"}\n</think>\n\n{"city": "Oslo"}',
        {"response_format": CITY},
        {"content": '{"city": "Oslo"}', "reasoning": 'Is it so? {"no"}'},
    ),
    "schema, no reasoning": (
        '{"city": "so <think> </think> it"}',
        {"response_format": CITY},
        {"content": '{"city": "so <think> </think> it"}'},
    ),
}


def special_tokens(tokenizer: Any) -> list[Any]:
    return [token for token in tokenizer.added_tokens_decoder.values() if token.special]


@pytest.mark.parametrize("row", ROWS)
def test_a_model_says_what_its_grammar_allows(tokenizer: Any, row: str) -> None:
    said, fields, expected = ROWS[row]
    if row == "schema, no reasoning" and any(token.content == "<think>" for token in special_tokens(tokenizer)):
        pytest.skip("special tokens are no part of a text")
    given = {"tools": fields["tools"]} if "tools" in fields else {}
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True, **given).input_ids
    model = scripted(tokenizer, len(prompt), said)
    own = tuple(tokenizer(said, add_special_tokens=False).input_ids)
    found = []
    wrong = RandomTree({tuple(prompt): own}, vocabulary=model.config.vocab_size)
    for drafter in (None, wrong, Merge([Lookahead(), GrammarDrafter()])):
        with serving(model, tokenizer, drafter) as server:
            asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 120, "return_token_ids": True} | fields
            response = server.post("/v1/chat/completions", **asked)
            assert response.status_code == 200, response.text
            found.append(response.json()["choices"][0])
    assert [one["token_ids"] for one in found[1:]] == [found[0]["token_ids"]] * 2
    message = found[0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    read = {"content": message["content"], "reasoning": message.get("reasoning_content"), "calls": len(calls)}
    assert read | expected == read
    assert all(call["name"] == LOOK["name"] and json.loads(call["arguments"]) == {"at": "sea"} for call in calls)
    if row != "one call":
        assert tuple(found[0]["token_ids"][: len(own)]) == own, "the model's own tokens"


# By family: texts of its chat templates, its markers, two calls, and one with other arguments.
AT, MOON = '{"at": "sea"}', '{"at": "moon"}'
FAMILIES: dict[str, tuple[str, list[str], str, str]] = {
    "llama3_json": (
        "<|start_header_id|>dictionary of argument name and its value",
        ["<|python_tag|>"],
        '{"name": "look", "parameters": AT}',
        '{"name": "look", "parameters": AT}; {"name": "look", "parameters": AT}',
    ),
    "mistral": (
        "[TOOL_CALLS]",
        ["[TOOL_CALLS]"],
        '[TOOL_CALLS] [{"name": "look", "arguments": AT}]',
        '[TOOL_CALLS][{"name": "look", "arguments": AT}, {"name": "look", "arguments": AT}]',
    ),
    "mistral_v11": (
        "[TOOL_CALLS][ARGS]",
        ["[TOOL_CALLS]", "[ARGS]"],
        "[TOOL_CALLS]look[ARGS]AT",
        "[TOOL_CALLS]look[ARGS]AT[TOOL_CALLS]look[ARGS]AT",
    ),
}
for NAME, FRONT, BACK, MARKS, NEWLINE in (
    ("deepseek_v3", "function<｜tool▁sep｜>look\n```json\n", "\n```", "```json", "\n"),
    ("deepseek_v31", "look<｜tool▁sep｜>", "", "", ""),
):
    ONE = f"<｜tool▁call▁begin｜>{FRONT}AT{BACK}<｜tool▁call▁end｜>"
    BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    TOKENS = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", BEGIN, END]
    FAMILIES[NAME] = MARKS + TOKENS[0] + END, TOKENS, BEGIN + ONE + END, BEGIN + ONE + NEWLINE + ONE + END


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_families_are_held_to_their_schema(demo: Any, name: str, special: bool) -> None:
    marks, tokens, one, two = FAMILIES[name]
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template = marks
    tokenizer.add_tokens(tokens, special_tokens=special)
    strict: Any = TOOLS[:1]
    form: dict[str, Any] = {"response_format": CITY}
    if name == "llama3_json":
        with pytest.raises(ApiError, match="writes calls as JSON, as an answer of this form"):
            says(tokenizer, "", **form)
    else:
        assert says(tokenizer, '{"city": "so"}', **form)
    for fields in ({}, {"tool_choice": "required"}, form, {"parallel_tool_calls": False}):
        if name == "llama3_json" and fields is form:
            continue
        assert says(tokenizer, one.replace("AT", AT), tools=strict, **fields)
        assert not says(tokenizer, one.replace("AT", MOON), tools=strict, **fields)
        assert says(tokenizer, two.replace("AT", AT), tools=strict, **fields) == ("parallel_tool_calls" not in fields)
        assert says(tokenizer, "Well, no.", tools=strict, **fields) == (fields in ({}, {"parallel_tool_calls": False}))
        assert says(tokenizer, f"Well. {one.replace('AT', AT)}", tools=strict, **fields) == (
            fields in ({}, {"parallel_tool_calls": False})
        )


def test_families_whose_calls_no_grammar_holds(demo: Any) -> None:
    for name in ("gemma4", "functiongemma", "qwen3_coder"):
        tokenizer = copy.deepcopy(demo.tokenizer)
        tokenizer.response_template = {
            "start_anchor": "A: ",
            "fields": {"tool_calls": FORMS[name].field, "content": {}},
        }
        with pytest.raises(ApiError, match="cannot be held to a grammar, as their arguments are not one JSON object"):
            says(tokenizer, "", tool_choice="required")
