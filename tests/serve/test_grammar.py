"""Grammars over HTTP: formats, vLLM's field, forced and strict tool calls; refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from serve_driver import MESSAGES, Running, serving
from tool_chat import ADD, ARGUMENTS, LOOK, THINKING, TOOLS, says, talking

from benchmarks.machine.schemas import SCHEMAS, record
from draftree import Grammar, GrammarDrafter, Lookahead, Merge, generate
from draftree.serve.chat import MessageReader
from draftree.serve.grammars import constraint_of
from draftree.serve.protocol import Chat
from draftree.serve.responses import sse
from draftree.serve.settings import ApiError


@pytest.fixture(scope="module")
def server(demo: Any) -> Iterator[Running]:
    with serving(demo.model, demo.tokenizer, Merge([Lookahead(), GrammarDrafter()]), slots=4) as running:
        yield running


@pytest.fixture(scope="module")
def talker(demo: Any) -> Iterator[Running]:
    with serving(demo.model, talking(demo.tokenizer), Merge([Lookahead(), GrammarDrafter()]), slots=4) as running:
        yield running


def chat(server: Running, **fields: Any) -> Any:
    given: dict[str, Any] = {"messages": MESSAGES, "temperature": 0} | fields
    response = server.post("/v1/chat/completions", **given)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def by_schema(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}


def test_the_client_parses_a_pydantic_model(server: Running) -> None:
    class Person(BaseModel):
        name: str
        age: int
        likes: list[str] = []

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.parse(
            model="draftree", messages=MESSAGES, response_format=Person, temperature=0, max_tokens=400
        )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("name", ["nested", "any-of", "unicode", "recursive-in-turns"])
def test_answers_fit_their_schema_and_equal_generate(server: Running, demo: Any, name: str) -> None:
    choice = chat(server, response_format=by_schema(name), max_tokens=300, return_token_ids=True)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS[name])
    assert choice["finish_reason"] == "stop"
    text = demo.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = demo.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    grammar = Grammar.json_schema(SCHEMAS[name])
    plain = generate(demo.model, ids, grammar=grammar, tokenizer=demo.tokenizer, max_new_tokens=300).sequences
    assert choice["token_ids"] == plain[0, ids.shape[1] :].tolist()
    events = server.events(
        "/v1/chat/completions",
        messages=MESSAGES,
        temperature=0,
        response_format=by_schema(name),
        max_tokens=300,
        draftree={"drafter": "off"},
    )
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == choice["message"]["content"]


def test_any_object(server: Running) -> None:
    text = chat(server, response_format={"type": "json_object"}, max_tokens=60)["message"]["content"]
    assert text.startswith("{")
    assert chat(server, response_format={"type": "text"}, max_tokens=5)["message"]["content"][0] != "{"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[a-c]{3}[0-9]"}, "[a-c]{3}[0-9]"),
        ({"grammar": 'root ::= [x-z] "-" [x-z]'}, "[x-z]-[x-z]"),
        ({"json": record(a={"enum": [1, 2]})}, r'\{"a": [12]\}'),
        ({"json": json.dumps(record(a={"enum": [1, 2]}))}, r'\{"a": [12]\}'),
    ],
)
def test_the_field_of_vllm(server: Running, more: dict[str, Any], expected: str) -> None:
    import re

    assert re.fullmatch(expected, server.complete("It is", structured_outputs=more)["choices"][0]["text"])
    sampled = chat(server, structured_outputs=more, temperature=1.5, seed=3)
    assert re.fullmatch(expected, sampled["message"]["content"])


def test_several_answers_have_grammars_of_their_own(server: Running) -> None:
    found = server.complete(
        ["A number:", "A word, then:"], n=3, temperature=1.0, seed=5, structured_outputs={"regex": "[a-z]{4}[0-9]{4}"}
    )
    texts = [choice["text"] for choice in found["choices"]]
    assert len(texts) == 6
    assert all(text[:4].isalpha() and text[4:].isdigit() and len(text) == 8 for text in texts)


# ---------------------------------------------------------------------------------------------------- tools


def calls_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of an answer's calls, with checked arguments."""
    found = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    for function in found:
        jsonschema.validate(json.loads(function["arguments"]), ARGUMENTS[function["name"]])
    return found


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_required_call(talker: Running, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 1, "tools": TOOLS, "max_tokens": 300}
    choice = chat(talker, tool_choice="required", parallel_tool_calls=False, **options)
    assert len(calls_of(choice)) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    for name in ("look", "add"):
        named = chat(talker, tool_choice={"type": "function", "function": {"name": name}}, **options)
        assert [function["name"] for function in calls_of(named)] == [name]


def test_lone_surrogates_in_a_call_are_replaced(demo: Any) -> None:
    reader = MessageReader(talking(demo.tokenizer), [], TOOLS)
    read = reader.feed(r'<call>{"name": "\ud800", "arguments": {}}</call>', last=True)
    written = sse({"tool_calls": read.calls}).removeprefix(b"data: ")
    assert json.loads(written)["tool_calls"][0]["function"]["name"] == "?"


def test_the_end_token_is_not_content(demo: Any) -> None:
    """The template ends the content by one EOS, the answer ends by another one."""
    model, other = copy.deepcopy(demo.model), "<|pad|>"
    pad = demo.tokenizer.convert_tokens_to_ids(other)
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [*([own] if isinstance(own, int) else own), pad]
    with serving(model, talking(demo.tokenizer)) as running:
        asked: dict[str, Any] = {"max_tokens": 5, "logit_bias": {str(pad): 100}}
        choice = chat(running, **asked)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
        events = running.events("/v1/chat/completions", messages=MESSAGES, temperature=0, **asked)
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == ""


@pytest.mark.parametrize("asked", [{"tools": TOOLS, "tool_choice": "none"}, {}], ids=["none wanted", "no tools"])
def test_an_unwanted_call_is_text(asked: dict[str, Any], talker: Running) -> None:
    said = '<call>{"name": "look", "arguments": {}}</call>'
    choice = chat(talker, structured_outputs={"choice": [said]}, **asked)
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
    assert "tool_calls" not in choice["message"]


def test_a_required_call_in_a_stream(talker: Running) -> None:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="draftree",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
            temperature=0,
        )
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    called = [call for delta in deltas for call in delta.tool_calls or ()]
    assert len(called) == 1
    jsonschema.validate(json.loads(called[0].function.arguments), ARGUMENTS[called[0].function.name])


SEA, SUM = ('{"name": "look", "arguments": {"at": "sea"}}', '{"name": "add", "arguments": {"a": 7, "b": 2}}')
FREE = '{"name": "add", "arguments": {"b": "x"}}'  # This function is not strict.
WRONG = '{"name": "look", "arguments": {"at": "moon"}}'


@pytest.mark.parametrize("opening", ["<call>", "<|system|>", {"open_pattern": r"\s*<\|call\|>"}])
def test_grammars_of_calls_and_text(demo: Any, opening: Any) -> None:
    """The marker of calls is a text, a special token, or a pattern of one text."""
    tokenizer = talking(demo.tokenizer, opening)
    mark = opening if isinstance(opening, str) else "<|call|>"

    def call(inner: str) -> str:
        return f"{mark}\n{inner}\n</call>"

    auto: dict[str, Any] = {}
    assert says(tokenizer, "Just text, and 1 < 2.", **auto)
    assert says(tokenizer, f"Let me look. {call(SEA)} And add: {call(FREE)}", **auto)
    assert not says(tokenizer, f"Let me look. {call(WRONG)}", **auto)
    assert not says(tokenizer, f"Cut off. {call(SEA)[:-3]}", **auto)
    single = {"parallel_tool_calls": False}
    assert says(tokenizer, "Well.", **single)
    assert says(tokenizer, f"Let me look. {call(SEA)}", **single)
    assert not says(tokenizer, f"{call(SEA)} Well.", **single)
    assert not says(tokenizer, f"{call(SEA)}{call(SEA)}", **single)
    forced = {"tool_choice": "required"}
    assert says(tokenizer, f"{call(SEA)}\n{call(SUM)}", **forced)
    assert says(tokenizer, f"{mark}{SEA}</call>", **forced)
    assert not says(tokenizer, call(FREE), **forced), "a forced call fits its schema, strict or not"
    assert not says(tokenizer, "No.", **forced)
    assert not says(tokenizer, f"{call(SEA)}{call(SUM)}", **forced, **single)
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": record(ok={"type": "boolean"})}}}
    assert says(tokenizer, '{"ok": true}', **form)
    assert says(tokenizer, call(SEA), **form)
    assert not says(tokenizer, "ok", **form)
    assert not says(tokenizer, '{"ok": true}', **form, **forced)


def test_references_in_a_function_s_schema(demo: Any) -> None:
    tokenizer = talking(demo.tokenizer)
    place = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "required": ["p"],
        "$defs": {"P": LOOK["parameters"]},
    }
    chain = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}
    tools = [
        {"type": "function", "function": {"name": n, "parameters": s}} for n, s in (("go", place), ('li"nk', chain))
    ]
    forced = {"tools": tools, "tool_choice": "required"}
    assert says(tokenizer, '<call>{"name": "go", "arguments": {"p": {"at": "sea"}}}</call>', **forced)
    assert not says(tokenizer, '<call>{"name": "go", "arguments": {"p": {"at": "moon"}}}</call>', **forced)
    assert says(tokenizer, '<call>{"name": "li\\"nk", "arguments": {"v": 1, "next": {"v": 2}}}</call>', **forced)
    assert not says(tokenizer, '<call>{"name": "li\\"nk", "arguments": {"v": 1, "next": {"w": 2}}}</call>', **forced)


def test_blank_lines_after_the_reasoning_are_not_content(demo: Any) -> None:
    tokenizer = talking(demo.tokenizer, thinking=THINKING)
    choice = {"tools": [], "structured_outputs": {"choice": ["yes", "no"]}}
    assert says(tokenizer, "yes", **choice)
    assert not says(tokenizer, "\n\nyes", **choice)
    text = "<think>so</think>\n\nyes"
    assert says(tokenizer, text, **choice)
    prompt = tokenizer("user: Hi\nassistant: ", add_special_tokens=False).input_ids
    for size in (1, 3, 100):
        reader = MessageReader(tokenizer, prompt, [])
        read = [reader.feed(text[at : at + size], last=at + size >= len(text)) for at in range(0, len(text), size)]
        assert "".join(one.content for one in read) == "yes"
        assert "".join(one.reasoning for one in read) == "so"


@pytest.mark.parametrize("end", ["</think>", "<|pad|>"])
def test_reasoning_precedes_the_grammar(demo: Any, end: str) -> None:
    tokenizer = talking(demo.tokenizer, thinking={"open": "<think>", "close": end})
    form = {"tools": [], "response_format": {"type": "json_object"}}
    thoughts = "Let me see: {a} or b?"
    assert says(tokenizer, "{}", **form)
    assert says(tokenizer, f"<think>{thoughts}{end}\n\n{{}}", **form)
    assert not says(tokenizer, f"<think>{thoughts}", **form)
    assert says(tokenizer, f"{thoughts}{end}{{}}", "thinking", **form)
    assert not says(tokenizer, "{}", "thinking", **form)
    assert says(tokenizer, f"<think>{thoughts}{end}\n<call>{SEA}</call>", tool_choice="required")
    assert not says(tokenizer, f"<think>{thoughts}{end}\nNo.", tool_choice="required")


def test_a_prompt_that_begins_the_reasoning(demo: Any) -> None:
    tokenizer = talking(demo.tokenizer, thinking=THINKING)
    with serving(demo.model, tokenizer) as running:
        choice = chat(
            running,
            structured_outputs={"choice": ["yes", "no"]},
            chat_template_kwargs={"start": "<think>"},
            max_tokens=12,
        )
        assert choice["finish_reason"] == "length", "a model that knows no markers thinks for ever"
        assert choice["message"]["reasoning_content"]
        assert choice["message"]["content"] in (None, "")


# ---------------------------------------------------------------------------------------------------- refusals

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "give one with a schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "leave it"),
    ({"response_format": by_schema("nested") | {"type": "xml"}}, "response_format.type", "wrong value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
        "response_format",
        "Invalid type: strin",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "leave ignore_eos out"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "no response_format beside it",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "Give one of json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "Give one of json"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "cannot be used"),
    ({"structured_outputs": {"beams": 2}}, "structured_outputs.beams", "There is no field"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda v: str(v)[:50])
def test_refusals_name_the_field(server: Running, fields: dict[str, Any], param: str, message: str) -> None:
    response = server.post("/v1/chat/completions", messages=MESSAGES, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert server.idle()


def test_tools_that_cannot_be_held_to_a_grammar(demo: Any) -> None:
    said = {"messages": MESSAGES, "tools": TOOLS}
    unlike = [
        talking(demo.tokenizer, {"open_pattern": "<call:(?P<name>[a-z]+)>"}),
        talking(demo.tokenizer, {"open": "<call>", "content": "text"}),
        talking(demo.tokenizer, {"open": ["<call>", "<other>"]}),
        talking(demo.tokenizer, {"open": "<call>", "content_args": {"unquoted_keys": True}}),
    ]
    for tokenizer in unlike:
        for fields in ({}, {"tool_choice": "required"}, {"parallel_tool_calls": False}):
            with pytest.raises(ApiError, match="cannot be held to a grammar"):
                constraint_of(Chat.model_validate(said | fields), TOOLS, tokenizer)
    loose: Any = [{"type": "function", "function": ADD}]
    assert constraint_of(Chat.model_validate(said | {"tools": loose}), loose, unlike[0]) is None
    closed = talking(demo.tokenizer)
    closed.response_template["fields"]["content"] = {"open": "<final>", "close": "</s>"}
    form = Chat.model_validate({"messages": MESSAGES, "response_format": {"type": "json_object"}})
    with pytest.raises(ApiError, match="which grammars do not support"):
        constraint_of(form, (), closed)
    named = Chat.model_validate(said | {"tool_choice": {"type": "function", "function": {"name": "fly"}}})
    with pytest.raises(ApiError, match="'fly', which is not among the tools"):
        constraint_of(named, TOOLS, talking(demo.tokenizer))


def test_a_grammar_without_a_next_token_is_an_error_of_the_request(server: Running) -> None:
    """The grammar ends before `min_tokens` is reached."""
    fields = {"structured_outputs": {"regex": "[a-z]{1,40}"}, "min_tokens": 60, "max_tokens": 80}
    response = server.post("/v1/chat/completions", messages=MESSAGES, **fields)
    assert response.status_code == 400, response.text
    assert "loosen one of them" in response.json()["error"]["message"]
    events = server.events("/v1/chat/completions", messages=MESSAGES, **fields)
    assert "loosen one of them" in events[-1]["error"]["message"]
    assert server.idle()
