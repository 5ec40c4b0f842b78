"""Find a model's response template, which describes how its answers write reasoning and tool calls.

A response template has the form of `transformers.utils.chat_parsing`. Parsing, streaming and grammars read it alike.
Few tokenizers bring one, so that common families are recognised by their chat templates.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

AUTO, NONE = "auto", "none"


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WHOLE = {"type": "function", "function": "{content}"}  # One JSON object with the keys "name" and "arguments".
NAMED = _call("{name}", "{content}")  # The name precedes the arguments, or both are keys of a list's items.
LISTED = _call("{name}", "{arguments}")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """Describe how a family writes tool calls.

    Attributes:
        marks: texts in the family's chat templates, all of them.
        field: the field `tool_calls` of its response template.
    """

    marks: tuple[str, ...]
    field: dict[str, Any]


def _json(
    marks: tuple[str, ...], begin: dict[str, Any], close: str | list[str], transform: Any, **more: Any
) -> ToolForm:
    return ToolForm(marks, begin | {"close": close, "content": "json", "repeats": True, "transform": transform} | more)


def _gemma(begin: str, end: str, quote: str) -> ToolForm:
    """Return a form with bare keys, and texts between quotes of its own."""
    opening = {"open_pattern": rf"{re.escape(begin)}call:(?P<name>[^{{]+)(?={{)"}
    return _json((begin,), opening, end, NAMED, content_args={"unquoted_keys": True, "string_delims": [[quote, quote]]})


# Forms by vLLM's names of their parsers; the first whose marks are all there is the model's.
FORMS: dict[str, ToolForm] = {
    "qwen3_coder": ToolForm(
        ("<tool_call>", "<function=", "<parameter="),
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "repeats": True,
            "transform": NAMED,
        },
    ),
    "hermes": _json(("<tool_call>",), {"open_pattern": r"\s*<tool_call>"}, "</tool_call>", WHOLE),  # Qwen 2.5, Qwen 3.
    "llama3_json": _json(
        ("<|start_header_id|>", "dictionary of argument name and its value"),
        {"open_pattern": r'\s*(?:<\|python_tag\|>)?(?={\s*"name"\s*:)'},
        ["<|eot_id|>", "<|eom_id|>"],
        _call("{content.name}", "{content.parameters}"),
    ),
    "mistral_v11": ToolForm(  # Mistral Small 3.2, Magistral, Devstral.
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
            "close_pattern": r"</s>|(?=\[TOOL_CALLS\])",
            "content": "json",
            "repeats": True,
            "transform": NAMED,
        },
    ),
    "mistral": _json(("[TOOL_CALLS]",), {"open": "[TOOL_CALLS]"}, "</s>", LISTED, transform_each=True),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "deepseek_v3": _json(  # DeepSeek V3 and R1.
        ("<｜tool▁call▁begin｜>", "```json"),
        {
            "open_pattern": "(?:<｜tool▁calls▁begin｜>)?\\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            "(?P<name>[^\n]+)\n```json\n"
        },
        "\n```<｜tool▁call▁end｜>",
        NAMED,
    ),
    "deepseek_v31": _json(
        ("<｜tool▁call▁begin｜>",),
        {"open_pattern": "(?:<｜tool▁calls▁begin｜>)?\\s*<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>"},
        "<｜tool▁call▁end｜>",
        NAMED,
    ),
    "pythonic": ToolForm(  # Llama 4, Gemma 3 with such a prompt.
        ("func_name1(",),
        {
            "open_pattern": r"\s*(?=\[[A-Za-z_][\w.-]*\()",
            "close_pattern": r"(?<=\)\])\s*(?=<|\Z)",
            "content": "python-call-list",
            "transform_each": True,
            "transform": LISTED,
        },
    ),
}
CALLS_END = "<｜tool▁calls▁end｜>"  # DeepSeek writes this after its last call; it is no content.
PARSERS = (AUTO, NONE, *FORMS)
# By a text in the chat template, the markers around the reasoning.
THINKING = {"<think>": ("<think>", "</think>"), "[THINK]": ("[THINK]", "[/THINK]")} | {
    "<|channel>thought": ("<|channel>thought\n", "<channel|>")
}
# Beginnings of an answer; the parser looks for the last one in the prompt.
ANCHOR = (
    r"<\|im_start\|>assistant\n|<\|(?:start_header_id|header_start)\|>assistant<\|(?:end_header_id|header_end)\|>\n\n"
    r"|<｜Assistant｜>|\[/(?:INST|TOOL_RESULTS)\]|<start_of_turn>model\n|<\|turn>model\n"
)


def response_template(tokenizer: Any, parser: str = AUTO) -> dict[str, Any] | None:
    """Return the response template of a model; None if its answers are text alone.

    Args:
        tokenizer: the model's; its own `response_template` comes first.
        parser: name of the form of its calls; "auto" for the tokenizer's own or a recognised one, "none" for no calls.
    """
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None and parser == AUTO:
        return own
    text = chat_text(tokenizer)
    fields = {name: field for name, field in ((own or {}).get("fields") or {}).items() if name != "tool_calls"}
    for mark, (begin, end) in THINKING.items():
        if own is None and mark in text:
            fields["reasoning_content"] = {"open": begin, "close": end}
            break
    found = (form for form in FORMS.values() if all(mark in text for mark in form.marks))
    form = next(found, None) if parser == AUTO else FORMS.get(parser)
    if form is not None:
        fields["tool_calls"] = form.field
    if not fields:
        return None
    content = {"close": CALLS_END} if CALLS_END in text else {}
    return (own or {"start_anchor_pattern": ANCHOR}) | {"fields": {"content": content} | fields}


def with_template(tokenizer: Any, parser: str = AUTO) -> Any:
    """Return the tokenizer with its response template; a copy if it has another one, or none, of its own."""
    found = response_template(tokenizer, parser)
    if found is getattr(tokenizer, "response_template", None):
        return tokenizer
    made = copy.copy(tokenizer)
    made.response_template = found
    return made


def chat_text(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat templates; "" for none."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return found if isinstance(found, str) else "\n".join(found.values())
