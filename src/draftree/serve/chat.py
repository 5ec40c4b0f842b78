"""Render messages as a prompt by the tokenizer's template, and parse outputs into message parts."""

from __future__ import annotations

import base64
import inspect
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from transformers.utils.chat_parsing import ResponseParser

from draftree.models import encode_seen, open_image
from draftree.serve.protocol import Chat, ImagePart, Message, TextPart, ToolCall
from draftree.serve.settings import ApiError
from draftree.serve.templates import FORMS, chat_text, response_template


class Regions(ResponseParser):
    """Parse like Hugging Face's parser, without errors: a malformed region ends with the event "region_broken".

    That event and "region_close" hold the text of the whole region with its markers as "raw"; that event also holds
    its "body".
    """

    _begin = _prompt = 0
    formed = False  # Whether a grammar holds the content, in which no region opens.

    def __init__(self, template: Any, prefix: str, tools: list[Any]) -> None:
        super().__init__(template, prefix=prefix, tools=tools or None)
        self._prompt = len(self._buffer)  # Start of the output's own text.

    def _watchlist(self) -> list[tuple[str, Any]]:
        text = (self._body[:99] + self._buffer[self._pos :][:99]).lstrip()
        free = not (self.formed and text and self._current == self._implicit_name)
        watch: list[tuple[str, Any]] = super()._watchlist()
        return [one for one in watch if free or one[0] == "close" or one[1].open_re.match(text, partial=True)]

    def rest(self) -> list[dict[str, Any]]:
        """Return the last events; unlike in `finalize`, required fields of the template may be missing."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        known, held = len(events), max(0, self._prompt - self._pos)  # The prompt's end may begin a marker.
        super()._accumulate(events, text)
        for event in events[known:]:
            if event["type"] == "region_chunk":
                event["text"] = event["text"][held:]

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        self._begin = m.start()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name, known = self._current, len(events)
        implicit = name == self._implicit_name
        body, raw = self._body, self._buffer[max(self._begin, self._prompt) : self._pos]
        try:
            super()._close_current(events)
        except Exception:  # Transforms of templates may raise anything.
            events.append({"type": "region_broken", "field": name, "body": body})
            self._reset_to_implicit()
        for event in events[known:]:
            event["raw"] = body if implicit else raw


REASONING = ("reasoning_content", "thinking")  # Names of the field in response templates.


def chat_prompt(
    tokenizer: Any, messages: Sequence[Message], folder: Path | None, **options: Any
) -> tuple[list[int], dict[str, Any] | None]:
    """Return the token ids of a chat and its image tensors, if any.

    Args:
        tokenizer: the model's.
        messages: the chat.
        folder: of images that messages may name; None for none.
        options: further variables of the template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError("The model's tokenizer has no chat template: use /v1/completions.", "messages")
    given = [_as_dict(message, folder) for message in messages]
    if "developer" not in str(tokenizer.chat_template):  # Templates drop messages of unknown roles.
        given = [one | {"role": "system"} if one["role"] == "developer" else one for one in given]
    try:
        return encode_seen(tokenizer, given, **options)
    except ValueError:
        raise
    except Exception as error:  # Templates may raise anything.
        raise ApiError(f"The model's chat template does not take these messages: {error}", "messages") from None


def template_variables(tokenizer: Any, given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables `given` in `chat_template_kwargs`."""
    taken = inspect.signature(type(tokenizer).apply_chat_template).parameters.keys() | {
        "check",
        "messages",
        "tokenizer",
    }
    for name in given or {}:
        if name in taken:
            message = f"chat_template_kwargs gives {name!r}, which is no variable of the chat template: leave it out."
            raise ApiError(message, f"chat_template_kwargs.{name}")
    return dict(given or {})


def _as_dict(message: Message, folder: Path | None) -> dict[str, Any]:
    """Return a message for templates: only set fields, arguments of calls as objects."""
    found = message.model_dump(include={"role", "name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    content = message.content or ""
    found["content"] = content if isinstance(content, str) else [_part(part, folder) for part in content]
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _part(part: TextPart | ImagePart, folder: Path | None) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return part.model_dump()
    try:
        return {"type": "image", "image": open_image(image_at(part.image_url.url, folder))}
    except ValueError as error:
        raise ApiError(str(error), "messages") from None


def image_at(url: str, folder: Path | None) -> bytes | Path:
    """Return the data of a data URL, or the path of a file URL in `folder`; nothing is fetched from the network.

    Raises:
        ValueError: another URL, data that is not base64, or a file that is not in the folder.
    """
    if re.match("data:image/[a-z.+-]+;base64,", url):
        return base64.b64decode(url.partition(",")[2], validate=True)
    if folder is None or not url.startswith("file://"):
        files = "" if folder is None else ", or name a file of this server's folder as file://NAME"
        raise ValueError(f"Images are not fetched: send each as a data URL (data:image/png;base64,...){files}.")
    path = (folder / unquote(url.removeprefix("file://"))).resolve()
    if not (path.is_relative_to(folder.resolve()) and path.is_file()):
        raise ValueError("There is no such image in this server's folder: name a file of it as file://NAME.")
    return path


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}  # Some clients send "" for no arguments.
    except (ValueError, RecursionError):
        raise ApiError("The arguments of a tool call in the messages are no JSON.", "messages") from None


def tools_of(body: Chat, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the tools for the chat template; none with the tool choice "none"."""
    if not body.tools and body.tool_choice not in (None, "none"):  # Some clients always send "none".
        raise ApiError("tool_choice needs tools, and there are no tools: give some.", "tool_choice")
    if not body.tools and body.parallel_tool_calls is not None:
        raise ApiError("parallel_tool_calls needs tools, and there are no tools: leave it out.", "parallel_tool_calls")
    if not body.tools or body.tool_choice == "none":
        return []
    if "tools" not in chat_text(tokenizer):
        raise ApiError("The model's chat template knows no tools: leave tools out.", "tools")
    if "tool_calls" not in ((response_template(tokenizer) or {}).get("fields") or {}):
        names = ", ".join(FORMS)
        message = "This server does not know how the model writes tool calls: leave tools out, or start it with "
        raise ApiError(f"{message}--tool-parser and one of {names}.", "tools")
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


@dataclass(slots=True)
class Read:
    """Hold the new parts of a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class Trim:
    """Drop the blanks around a text that arrives in pieces, as response templates do by default."""

    def __init__(self, field: dict[str, Any]) -> None:
        self._strips = (field.get("content_args") or {}).get("strip", True)
        self._begun, self._held = False, ""

    def feed(self, text: str) -> str:
        """Return the text that can be passed on; blanks wait for more text."""
        if not self._strips:
            return text
        text = self._held + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._begun, self._held = self._begun or bool(kept), text[len(kept) :]
        return kept


class MessageReader:
    """Parse the text of an output incrementally into content, reasoning and tool calls.

    The parts have the text that `tokenizer.parse_response` gives, without the blanks around them.

    Args:
        tokenizer: without a response template, all text is content.
        prompt: token ids; templates may begin the answer in the prompt.
        tools: tools of the request; without tools, calls are content.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], tools: list[dict[str, Any]]) -> None:
        self._parser = None
        self.calls = 0  # Number of calls so far.
        template = response_template(tokenizer) or {"fields": {}}
        fields = {name: field for name, field in template["fields"].items() if tools or name != "tool_calls"}
        self._content = Trim(fields.get("content") or {})
        self._reasoning = Trim(next((fields[name] for name in REASONING if name in fields), {}))
        if any(fields.values()):
            self._parser = Regions(template | {"fields": fields}, tokenizer.decode(list(prompt)), tools)

    @property
    def begun(self) -> str | None:
        """Return the field of the answer that the prompt has begun; None for none."""
        open_now = None
        for event in [] if self._parser is None else self._parser.initial_events:
            if event["type"] == "region_open":
                open_now = event.get("field")
            elif event["type"] == "region_close":
                open_now = None
        return open_now

    def hold(self) -> None:
        """Read markers in the content as text, which a grammar holds to a form."""
        if self._parser is not None:
            self._parser.formed = True

    @property
    def raw(self) -> bool:
        """Return True if `feed` needs the text with its special tokens."""
        return self._parser is not None

    def feed(self, text: str, *, last: bool = False, end_token: str = "") -> Read:
        """Return the parts of the message that a piece of text adds.

        Args:
            text: next text, with special tokens if `raw`.
            end_token: text of the special token that ended the output, "" for none; it is never content.
        """
        if self._parser is None:
            return Read(text)
        events = list(self._parser.feed(text)) if text else []
        if last:
            events += self._parser.rest()
        read = Read()
        for event in events:
            self._take(event, read)
        if end_token:
            read.content = read.content.removesuffix(end_token)
            read.reasoning = read.reasoning.removesuffix(end_token)
        read.content, read.reasoning = self._content.feed(read.content), self._reasoning.feed(read.reasoning)
        return read

    def _take(self, event: dict[str, Any], read: Read) -> None:
        name = event.get("field")
        if event["type"] in ("region_close", "region_broken") and name == "tool_calls":
            calls = _calls_of(event["value"]) if "value" in event else _loose_calls(event["body"])
            read.calls += calls
            self.calls += len(calls)
            if not calls:
                read.content += event["raw"]
        elif event["type"] == "region_broken" and name not in ("content", *REASONING):
            read.content += event["raw"]
        elif event["type"] == "region_chunk" and not event.get("dirty"):
            text = event.get("text") or ""
            if name in REASONING:
                read.reasoning += text
            elif name == "content":
                read.content += text


def _valid(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can name and UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _calls_of(value: Any) -> list[dict[str, Any]]:
    """Return the calls of a region as API objects; none if one of them is malformed."""
    calls = []
    for one in value if isinstance(value, list) else [value]:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return []
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict):
            return []
        try:
            written = _valid(arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False))
            if not isinstance(json.loads(written, parse_constant=int), dict):  # "int" refuses NaN and Infinity.
                return []
        except (ValueError, RecursionError):
            return []
        own = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        calls.append(own | {"function": {"name": _valid(function["name"]), "arguments": written}})
    return calls


def _loose_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of a region that its template cannot read; none if one of them is malformed.

    Llama 3 writes "arguments" for "parameters" at times, and several calls between semicolons.
    """
    calls: list[dict[str, Any]] = []
    try:
        while text := text.lstrip("; \n"):
            one, end = json.JSONDecoder().raw_decode(text)
            found = _calls_of({"function": one | {"arguments": one.get("arguments", one.get("parameters"))}})
            calls, text = calls + found, text[end:] if found else "malformed"
    except (ValueError, RecursionError, TypeError, AttributeError):
        return []
    return calls
