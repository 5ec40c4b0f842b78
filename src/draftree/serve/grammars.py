"""Build grammars for `response_format`, vLLM's `structured_outputs` and forced or strict tool calls.

A model with a response template may reason first; the grammar applies to the text after that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftree.grammar import Grammar, GrammarBusyError, GrammarError
from draftree.serve.chat import REASONING
from draftree.serve.protocol import Chat, NamedTool, Sampling
from draftree.serve.settings import ApiError

ANYTHING = "/(?s:.*)/"
WHOLE_CALL = {"type": "function", "function": "{content}"}  # How templates describe calls that are one JSON object.
FORMS: dict[str, Any] = {
    "json_": Grammar.json_schema,
    "json_object": lambda _: Grammar.json(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.ebnf,
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """Hold a grammar and the field of the request that asked for it."""

    grammar: Grammar
    field: str


@contextmanager
def refused(field: str) -> Iterator[None]:
    """Turn errors of grammars into API errors about `field`."""
    try:
        yield
    except GrammarBusyError as error:
        raise ApiError(str(error), field, status=503, retry_after=60) from None
    except GrammarError as error:
        raise ApiError(str(error), field) from None


def constraint_of(
    body: Sampling, tools: Sequence[dict[str, Any]], tokenizer: Any, begun: str | None = None
) -> Constraint | None:
    """Return the grammar of a request; None for none.

    Args:
        body: the request.
        tools: see `tools_of`.
        tokenizer: the model's.
        begun: see `MessageReader.begun`.

    Raises:
        ApiError: fields contradict each other, a grammar is invalid, or the model's calls are in no supported form.
    """
    form, chat = _form(body), isinstance(body, Chat)
    found = (isinstance(body, Chat) and _calls(body, tools, tokenizer, form)) or form
    if found is None:
        return None
    if body.ignore_eos:
        raise ApiError("A grammar decides where the answer ends: leave ignore_eos out.", "ignore_eos")
    content = _field(tokenizer, "content") or {}
    if chat and ("open" in content or "open_pattern" in content):
        message = "This model's content stands between markers, which grammars do not support: leave "
        raise ApiError(f"{message}{found.field} out, or use /v1/completions.", found.field)
    thinking = _thinking(tokenizer, begun) if chat else None
    with refused(found.field):
        return Constraint(found.compose(thinking), found.field)


@dataclass(frozen=True, slots=True)
class _Rules:
    """Hold a grammar before it is composed."""

    start: str  # First rule, in Lark; it names `rules` and `parts`.
    rules: tuple[str, ...]
    parts: dict[str, Grammar]
    field: str  # Field of the request that asked for it.

    def compose(self, thinking: tuple[str, str] | None) -> Grammar:
        """Return the grammar, after `thinking` (its beginning and its rule) if the model reasons."""
        if thinking is None and self.start == "@content":
            return self.parts["content"]
        start, rules = self.start, self.rules
        if thinking is not None:
            start, rules = f"{thinking[0]} ({start})", (*rules, thinking[1])
        return Grammar.ebnf("\n".join([f"start: {start}", *rules]), **self.parts)


def _form(body: Sampling) -> _Rules | None:
    """Return the rules of `response_format` or `structured_outputs`."""
    form, more = body.response_format, body.structured_outputs
    if form is not None and (form.json_schema is None) == (form.type == "json_schema"):
        advice = "leave it out" if form.json_schema is not None else "give one with a schema in it"
        raise ApiError(f"json_schema belongs to the type 'json_schema': {advice}.", "response_format.json_schema")
    if form is not None and form.type == "text":
        form = None
    if more is not None:
        given = [name for name in FORMS if getattr(more, name) is not None]
        if len(given) != 1 or form is not None:
            raise ApiError(
                "Give one of json, json_object, regex, choice and grammar, and no response_format beside it.",
                "structured_outputs",
            )
        with refused("structured_outputs"):
            return _Rules("@content", (), {"content": FORMS[given[0]](getattr(more, given[0]))}, "structured_outputs")
    if form is None:
        return None
    with refused("response_format"):
        schema = None if form.json_schema is None else form.json_schema.schema_
        content = Grammar.json() if schema is None else Grammar.json_schema(schema)
    return _Rules("@content", (), {"content": content}, "response_format")


def _calls(body: Chat, tools: Sequence[dict[str, Any]], tokenizer: Any, form: _Rules | None) -> _Rules | None:
    """Return the rules of tool calls and the text beside them; None leaves both to the model."""
    choice, single = body.tool_choice, body.parallel_tool_calls is False
    forced = choice == "required" or isinstance(choice, NamedTool)
    if not tools:
        return None
    if isinstance(choice, NamedTool):
        name, single = choice.function.name, True
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ApiError(f"tool_choice names {name[:100]!r}, which is not among the tools.", "tool_choice")
    strict = any(tool["function"].get("strict") for tool in tools)
    if not (forced or single or strict or form):
        return None
    markers = _markers(tokenizer, "tool_calls", r"\s*")
    if markers is None:
        raise ApiError(
            "This model's calls cannot be held to a grammar, as its response_template does not have them as one JSON "
            "object between two markers: leave response_format, parallel_tool_calls, strict and other tool_choices "
            "than 'auto' and 'none' out.",
            "tools",
        )
    begin, end = (_lark(tokenizer, marker) for marker in markers)
    parts, written = {}, []
    with refused("tools"):
        for i, tool in enumerate(tools):
            parts[f"arguments{i}"] = Grammar.json_schema(_arguments_of(tool["function"], forced))
            name = json.dumps(tool["function"]["name"], ensure_ascii=False)
            front = json.dumps(f'{{"name": {name}, "arguments": ')
            written.append(f'({front} @arguments{i} "}}")')
    one = " | ".join(written)
    call = f'"\\n"? ({one}) "\\n"? {end}'
    if forced or form is not None:
        more = "" if single else '("\\n"? call)*'
        rules = f"calls: call {more}", f"call: {begin} {call}"
        others = {} if forced or form is None else form.parts
        return _Rules("@content | calls" if others else "calls", rules, parts | others, "tools")
    often = "?" if single else "*"
    if begin.startswith("<"):  # A special token is no part of any text.
        return _Rules(f"({ANYTHING} {begin} {call}){often} {ANYTHING}", (), parts, "tools")
    without = re.escape(markers[0]).replace("/", r"\/")
    rules = f"before[suffix={begin}]: {ANYTHING}", f"REST: {ANYTHING} & ~/(?s:.*){without}(?s:.*)/"
    return _Rules(f"(before {call}){often} REST", rules, parts, "tools")


def _arguments_of(function: dict[str, Any], forced: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments if they are constrained; it stays a root for its references."""
    asked: dict[str, Any] = {}
    if forced or function.get("strict"):
        asked = function.get("parameters", {"type": "object", "properties": {}, "additionalProperties": False})
    typed = asked.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}  # Keywords that fix the type.
    return asked if typed else {"type": "object"} | asked


def _thinking(tokenizer: Any, begun: str | None) -> tuple[str, str] | None:
    """Return the beginning of the reasoning in Lark, and its rule; None if the model does not reason."""
    for name in REASONING:
        markers = _markers(tokenizer, name, "")
        if markers is None or begun not in (None, name):
            continue
        begin, end = (_lark(tokenizer, marker) for marker in markers)
        rule = f"thoughts: {ANYTHING} {end}" if end.startswith("<") else f"thoughts[suffix={end}]: {ANYTHING}"
        # Templates leave up to two blanks after the reasoning; `MessageReader` strips them.
        return (r"thoughts /\s{0,2}/" if begun == name else rf"({begin} thoughts /\s{{0,2}}/)?"), rule
    return None


def _markers(tokenizer: Any, name: str, before: str) -> tuple[str, str] | None:
    """Return the markers around a field in the response template; None if they are no plain texts.

    Calls must also be one JSON object. The pattern `before` may precede the first marker.
    """
    field = _field(tokenizer, name)
    if field is None:
        return None
    if name == "tool_calls":
        written = field.get("content"), field.get("content_args") or {}, field.get("transform")
        if written != ("json", {}, WHOLE_CALL):
            return None
    begin, end = _literal(field, "open", before), _literal(field, "close", "")
    return None if begin is None or end is None else (begin, end)


def _field(tokenizer: Any, name: str) -> dict[str, Any] | None:
    """Return a field of the response template; None for none."""
    template = getattr(tokenizer, "response_template", None) or {}
    found: dict[str, Any] | None = (template.get("fields") or {}).get(name)
    return found


def _literal(field: dict[str, Any], name: str, before: str) -> str | None:
    given = field.get(name)
    if given is not None:
        if name == "open" and not isinstance(given, str) and len(given) > 1:
            return None  # Text after another opening would escape the grammar.
        return str(given if isinstance(given, str) else given[0])
    pattern = field.get(f"{name}_pattern", "").removeprefix(before)
    text = re.sub(r"\\(\W)", r"\1", pattern)
    return text if text and re.escape(text) == pattern else None


def _lark(tokenizer: Any, marker: str) -> str:
    """Return a marker in llguidance's Lark: special tokens by their id in angle brackets, others as text."""
    for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special and token.content == marker:
            return f"<[{number}]>"
    return json.dumps(marker)
