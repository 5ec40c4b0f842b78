"""Response templates of families: recognised by the chat template, read whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from draftree.serve.chat import MessageReader
from draftree.serve.settings import ServerSettings
from draftree.serve.templates import FORMS, response_template, with_template

PLACE = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PLACE}}]
GIVEN = {"at": "sea; {x}", "n": 2}
JSON = json.dumps(GIVEN)
XML = (
    "<tool_call>\n<function=look>\n<parameter=at>\nsea; {x}\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
HERMES = f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>'
LISTED = f'{{"name": "look", "arguments": {JSON}}}'
CALLS_END = "<｜tool▁calls▁end｜>"
# By family: texts of its chat templates, the beginning of an answer, and an answer with two calls.
SAID = {
    "hermes": ("<tool_call>", "<|im_start|>assistant\n", f"{HERMES}\n{HERMES}"),
    "qwen3_coder": ("<tool_call><function=<parameter=", "<|im_start|>assistant\n", f"{XML}\n{XML}"),
    "llama3_json": (
        "dictionary of argument name and its value",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f'{{"name": "look", "parameters": {JSON}}}; {LISTED}<|eot_id|>',  # Both spellings are seen.
    ),
    "mistral": ("[TOOL_CALLS]", "[/INST]", f"[TOOL_CALLS] [{LISTED}, {LISTED}]</s>"),
    "mistral_v11": (
        "[TOOL_CALLS][ARGS]",
        "[/INST]",
        f"[TOOL_CALLS]look[ARGS]{JSON}[TOOL_CALLS]look[CALL_ID]1[ARGS]{JSON}</s>",
    ),
    "functiongemma": (
        "<start_function_call>",
        "<start_of_turn>model\n",
        "<start_function_call>call:look{at:<escape>sea; {x}<escape>,n:2}<end_function_call>" * 2,
    ),
    "gemma4": ("<|tool_call>", "<|turn>model\n", '<|tool_call>call:look{at:<|"|>sea; {x}<|"|>,n:2}<tool_call|>' * 2),
    "deepseek_v3": (
        f"<｜tool▁call▁begin｜>```json{CALLS_END}",
        "<｜Assistant｜>",
        f"<｜tool▁calls▁begin｜>{DEEPSEEK}\n{DEEPSEEK}{CALLS_END}",
    ),
    "deepseek_v31": (
        f"<｜tool▁call▁begin｜>{CALLS_END}",
        "<｜Assistant｜>",
        f"<｜tool▁calls▁begin｜>{f'<｜tool▁call▁begin｜>look<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>' * 2}{CALLS_END}",
    ),
}


class Family:
    """Stand for a tokenizer with this chat template; its ids are code points."""

    response_template: Any = None

    def __init__(self, chat_template: Any) -> None:
        self.chat_template = chat_template

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(map(chr, ids))


def test_every_form_is_tested() -> None:
    assert SAID.keys() == FORMS.keys()


@pytest.mark.parametrize("name", SAID)
def test_calls_of_a_family(name: str) -> None:
    marks, anchor, calls = SAID[name]
    family, said = Family(f"{marks}<think>"), f"<think>\nLet me see.\n</think>\n\nWell.\n{calls}"
    template = response_template(family)
    assert template is not None
    if name != "llama3_json":  # transformers refuses its loose form.
        whole = parse_response(said, template, prefix=anchor, tools=TOOLS)
        assert (whole["reasoning_content"], whole["content"]) == ("Let me see.", "Well.")
    for size in (1, 3, 1000):
        reader = MessageReader(family, [ord(c) for c in f"[/INST]<think>{anchor}"], TOOLS)
        content, reasoning, found = "", "", []
        for at in range(0, len(said), size):
            read = reader.feed(said[at : at + size], last=at + size >= len(said))
            content, reasoning, found = content + read.content, reasoning + read.reasoning, found + read.calls
        assert (reasoning, content) == ("Let me see.", "Well.")
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found] == [
            ("look", GIVEN)
        ] * 2


def test_the_choice_of_a_template() -> None:
    qwen = Family({"default": "{{ messages }}", "tool_use": "{{ tools }}<tool_call>"})
    assert response_template(Family("{{ messages }}")) is None
    assert response_template(qwen, "none") is None
    fields = with_template(qwen).response_template["fields"]
    assert fields == {"content": {}, "tool_calls": FORMS["hermes"].field}
    assert qwen.response_template is None, "the user's tokenizer stays as it is"
    assert response_template(qwen, "mistral")["fields"]["tool_calls"] == FORMS["mistral"].field  # type: ignore[index]
    own = {"start_anchor": "A: ", "fields": {"thinking": {"open": "<t>", "close": "</t>"}, "tool_calls": {"open": "!"}}}
    qwen.response_template = own
    assert with_template(qwen) is qwen
    assert with_template(qwen, "none").response_template["fields"].keys() == {"content", "thinking"}
    assert with_template(qwen, "hermes").response_template["fields"]["thinking"] == own["fields"]["thinking"]  # type: ignore[index]
    with pytest.raises(ValueError, match="Did you mean 'hermes'"):
        ServerSettings(tool_parser="hermse")


def test_blanks_around_reasoning_and_content() -> None:
    """They are those of `parse_response`, in pieces too; blanks within stay."""
    family, said = Family("{{ m.split('</think>') }}"), "<think>\n\na  b \n</think>\n\n  c\n\nd \n"
    template = response_template(family)
    assert template is not None
    whole = parse_response(said, template, prefix="")
    assert (whole["reasoning_content"], whole["content"]) == ("a  b", "c\n\nd")
    for size in (1, 4, 1000):
        reader = MessageReader(family, [], [])
        parts = [reader.feed(said[at : at + size], last=at + size >= len(said)) for at in range(0, len(said), size)]
        assert "".join(part.reasoning for part in parts) == "a  b"
        assert "".join(part.content for part in parts) == "c\n\nd"
