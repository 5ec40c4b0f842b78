"""Find a model's response template, which describes how its answers write reasoning and tool calls.

A response template has the form of `transformers.utils.chat_parsing`. Parsing, streaming and grammars read it alike.
Few tokenizers bring one, so that common families are recognised by their chat templates.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

AUTO = "auto"


class ToolForm(NamedTuple):
    """Hold texts by which a family's chat template is known, and the field `tool_calls` of its response template."""

    marks: tuple[str, ...]
    field: dict[str, Any]


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _form(*marks: str, **field: Any) -> ToolForm:
    return ToolForm(marks, {"content": "json", "repeats": True, "transform": _call("{name}", "{content}")} | field)


def _gemma(begin: str, end: str, quote: str) -> ToolForm:
    opening = rf"{re.escape(begin)}call:(?P<name>[^{{]+)(?={{)"
    bare = {"unquoted_keys": True, "string_delims": [[quote, quote]]}
    return _form(begin, open_pattern=opening, close=end, content_args=bare)


# Forms by vLLM's names of their parsers; the first whose marks are all there is the model's.
FORMS = {
    "qwen3_coder": _form(
        *("<tool_call>", "<function=", "<parameter="),
        open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    ),
    "hermes": _form(  # Qwen 2.5 and 3 too.
        "<tool_call>",
        open_pattern=r"\s*<tool_call>",
        close="</tool_call>",
        transform={"type": "function", "function": "{content}"},
    ),
    "llama3_json": _form(
        "dictionary of argument name and its value",
        open_pattern=r'\s*(?:<\|python_tag\|>)?(?={\s*"name"\s*:)',
        close=["<|eot_id|>", "<|eom_id|>", "<|eot|>"],
        transform=_call("{content.name}", "{content.parameters}"),
    ),
    "mistral_v11": _form(  # Mistral Small 3.2, Magistral, Devstral.
        *("[TOOL_CALLS]", "[ARGS]"),
        open_pattern=r"\[TOOL_CALLS\](?P<name>[^\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
        close_pattern=r"</s>|(?=\[TOOL_CALLS\])",
    ),
    "mistral": _form(
        "[TOOL_CALLS]",
        open="[TOOL_CALLS]",
        close="</s>",
        transform=_call("{name}", "{arguments}"),
        transform_each=True,
    ),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "deepseek_v3": _form(  # DeepSeek R1 too.
        *("<｜tool▁call▁begin｜>", "```json"),
        open_pattern="(?:<｜tool▁calls▁begin｜>)?\\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        close="\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": _form(
        "<｜tool▁call▁begin｜>",
        open_pattern="(?:<｜tool▁calls▁begin｜>)?\\s*<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>",
        close="<｜tool▁call▁end｜>",
    ),
}
CALLS_END = "<｜tool▁calls▁end｜>"  # DeepSeek writes this after its last call; it is no content.
PARSERS = (AUTO, "none", *FORMS)
# By a text in the chat template, the markers around the reasoning.
THINKING = {
    "think>": ("<think>", "</think>"),  # Templates of DeepSeek R1 have the second alone.
    "[THINK]": ("[THINK]", "[/THINK]"),
    "<|channel>thought": ("<|channel>thought\n", "<channel|>"),
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
