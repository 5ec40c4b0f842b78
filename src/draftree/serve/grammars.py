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

from draftree.grammar import Grammar, GrammarBusyError, GrammarError, lark_text
from draftree.serve.chat import REASONING
from draftree.serve.protocol import Chat, NamedTool, Sampling
from draftree.serve.settings import ApiError
from draftree.serve.templates import CALLS_END, FORMS, response_template

ANYTHING = "/(?s:.*)/"
CONSTRUCTORS: dict[str, Any] = {
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
    """Return the grammar of a request; None for none."""
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

    def compose(self, thinking: tuple[str, tuple[str, ...]] | None) -> Grammar:
        """Return the grammar, after `thinking` (its beginning and its rules) if the model reasons."""
        if thinking is None and self.start == "@content":
            return self.parts["content"]
        start, rules = self.start, self.rules
        if thinking is not None:
            start, rules = f"{thinking[0]} ({start})", (*rules, *thinking[1])
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
        given = [name for name in CONSTRUCTORS if getattr(more, name) is not None]
        if len(given) != 1 or form is not None:
            raise ApiError(
                "Give one of json, json_object, regex, choice and grammar, and no response_format beside it.",
                "structured_outputs",
            )
        with refused("structured_outputs"):
            return _Rules(
                "@content", (), {"content": CONSTRUCTORS[given[0]](getattr(more, given[0]))}, "structured_outputs"
            )
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
    written = _call_form(tokenizer)
    opening = None if written is None else _up_to(tokenizer, "before", written.mark, written.pattern)
    if written is None or opening is None:
        raise ApiError(
            "This model's calls cannot be held to a grammar, as their arguments are not one JSON object after the name "
            "of the function: leave response_format, parallel_tool_calls, strict and other tool_choices than 'auto' "
            "and 'none' out.",
            "tools",
        )
    if form is not None and not forced and written.first.startswith("{"):  # llguidance chooses at the first token.
        raise ApiError("This model writes calls as JSON, as an answer of this form: leave it or tools out.", form.field)
    call, parts = _call_rule(tokenizer, written, tools, forced)
    more = "" if single else f"({_lark(tokenizer, written.between)} call)*"
    calls = f"call {more} {_lark(tokenizer, written.last)}"
    if forced or form is not None:
        others = {} if forced or form is None else form.parts
        rules = call, f"calls: {_lark(tokenizer, written.first)} {calls}"
        return _Rules("@content | calls" if others else "calls", rules, parts | others, "tools")
    if written.alone or single:  # Text after the only call would be a second call that the model is kept from.
        begun = _lark(tokenizer, written.first.rpartition(written.mark)[2])
        return _Rules(f"before_rest | before {begun} {calls}", (call, *opening), parts, "tools")
    return _Rules("(before call)* before_rest", (call, *opening), parts, "tools")


def _call_rule(
    tokenizer: Any, written: _CallForm, tools: Sequence[dict[str, Any]], forced: bool
) -> tuple[str, dict[str, Grammar]]:
    """Return the Lark rule of one call of any tool, and the grammars of their arguments."""
    parts, ways = {}, []
    with refused("tools"):
        for i, tool in enumerate(tools):
            parts[f"arguments{i}"] = Grammar.json_schema(_arguments_of(tool["function"], forced))
            name = tool["function"]["name"]
            before = written.before.replace("NAME", name).replace("QUOTED", json.dumps(name, ensure_ascii=False))
            ways.append(f"{_lark(tokenizer, before)} @arguments{i} {_lark(tokenizer, written.after)}")
    return f"call: {' | '.join(ways)}", parts


@dataclass(frozen=True, slots=True)
class _CallForm:
    """Describe how a model writes calls; "␤" is an optional line break, "␣" a space, NAME or (JSON) QUOTED the name."""

    mark: str  # The text in `first` after which no other text may follow.
    before: str  # Before the arguments of a call.
    after: str
    first: str  # Before all calls.
    between: str
    last: str = ""
    pattern: str | None = None  # All texts that begin a call to the parser, if there are more than `mark`.
    alone: bool = True  # No text follows the calls.


OPTIONAL = {"␤": r'"\n"?', "␣": '" "?'}


def _deepseek(before: str, after: str, between: str) -> _CallForm:
    first, begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    return _CallForm(first, before, after + end, first + begin, between + begin, CALLS_END, "<｜tool▁calls?▁begin｜>")


BY_NAME = {
    "llama3_json": _CallForm(
        '{"name":', ' QUOTED, "parameters": ', "}", '{"name":', '; {"name":', pattern=r'\{\s*"name"\s*:'
    ),
    "mistral": _CallForm("[TOOL_CALLS]", '{"name": QUOTED, "arguments": ', "}", "[TOOL_CALLS]␣[", ", ", "]"),
    "mistral_v11": _CallForm("[TOOL_CALLS]", "NAME[ARGS]", "", "[TOOL_CALLS]", "[TOOL_CALLS]"),
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>NAME\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("NAME<｜tool▁sep｜>", "", ""),
}


def _call_form(tokenizer: Any) -> _CallForm | None:
    """Return how the model writes calls; None if a grammar cannot."""
    field = _field(tokenizer, "tool_calls")
    known = next((form for name, form in BY_NAME.items() if field == FORMS[name].field), None)
    markers = _markers(tokenizer, "tool_calls", r"\s*")
    if known is not None or markers is None:
        return known
    begin, end = markers
    before, after = '␤{"name": QUOTED, "arguments": ', f"}}␤{end}"
    return _CallForm(begin, before, after, first=begin, between=f"␤{begin}", alone=False)


def _arguments_of(function: dict[str, Any], forced: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments if they are constrained; it stays a root for its references."""
    asked: dict[str, Any] = {}
    if forced or function.get("strict"):
        asked = function.get("parameters", {"type": "object", "properties": {}, "additionalProperties": False})
    typed = asked.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}  # Keywords that fix the type.
    return asked if typed else {"type": "object"} | asked


def _thinking(tokenizer: Any, begun: str | None) -> tuple[str, tuple[str, ...]] | None:
    """Return the beginning of the reasoning in Lark, and its rules; None if the model does not reason."""
    for name in REASONING:
        markers = _markers(tokenizer, name, "")
        rules = None if markers is None else _up_to(tokenizer, "thoughts", markers[1])
        if markers is None or rules is None or begun not in (None, name):
            continue
        # Templates leave up to two blanks after the reasoning, which are no content.
        after = r"thoughts /\s{0,2}/"
        return after if begun == name else f"({_lark(tokenizer, markers[0])} {after})?", rules
    return None


def _up_to(tokenizer: Any, name: str, mark: str, pattern: str | None = None) -> tuple[str, ...] | None:
    """Return Lark rules: `name` for a text up to `mark` and with it, `name`_rest for a text; none has `pattern`.

    None if marker tokens follow text in `mark`.
    """
    without = (re.escape(mark) if pattern is None else pattern).replace("/", r"\/")
    text, lark = name.upper(), _lark(tokenizer, mark)
    if " <[" in lark:
        return None
    rule = f"{name}: {text} {lark}" if lark.startswith("<") else f"{name}[suffix={lark}]: {text}"
    return rule, f"{name}_rest: {text}", f"{text}: {ANYTHING} & ~/(?s:.*){without}(?s:.*)/"


def _markers(tokenizer: Any, name: str, before: str) -> tuple[str, str] | None:
    """Return the markers around a field in the response template; None if they are no plain texts.

    Calls must also be one JSON object. The pattern `before` may precede the first marker.
    """
    field = _field(tokenizer, name)
    if field is None:
        return None
    if name == "tool_calls":
        written = field.get("content"), field.get("content_args") or {}, field.get("transform")
        if written != ("json", {}, FORMS["hermes"].field["transform"]):
            return None
    begin, end = _literal(field, "open", before), _literal(field, "close", "")
    return None if begin is None or end is None else (begin, end)


def _field(tokenizer: Any, name: str) -> dict[str, Any] | None:
    """Return a field of the response template; None for none."""
    template = response_template(tokenizer) or {}
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


def _lark(tokenizer: Any, text: str) -> str:
    """Return a text of `_CallForm` in Lark."""
    parts = [OPTIONAL.get(part) or lark_text(tokenizer, part) for part in re.split("([␤␣])", text)]
    return " ".join(filter(None, parts))
