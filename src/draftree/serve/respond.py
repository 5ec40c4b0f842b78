"""Answer /v1/responses: translate its items to a chat, and the chat's answer back; nothing is stored."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from draftree.serve.output import Delta, OutputStream, RequestOutput
from draftree.serve.protocol import Chat, Common, Function, NamedFunction, Strict
from draftree.serve.responses import KEEP_ALIVE, Call, api_error, message_parts, statistics, usage
from draftree.serve.settings import ApiError


class Item(Strict, extra="ignore"):
    """Hold a part of a dialogue; the items of earlier responses come back with fields of no use here."""


class Text(Item):
    """Hold a part of a content."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str


class Shown(Item):
    """Hold an image."""

    type: Literal["input_image"]
    image_url: str


class Said(Item):
    """Hold a message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Text | Shown]


class Thought(Item):
    """Hold the reasoning before an answer."""

    type: Literal["reasoning"]
    content: list[Text] = Field(default_factory=list)


class Called(Item):
    """Hold a call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class Returned(Item):
    """Hold the result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Text]


class FunctionTool(Function):
    """Describe a function that the model may call."""

    type: Literal["function"]


class NamedChoice(NamedFunction):
    """Name the function to call."""

    type: Literal["function"]


class Format(Strict):
    """Choose the form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """Hold options of the text."""

    format: Format | None = None


class Reasoning(Strict):
    """Hold options of the reasoning; there are no summaries."""

    effort: str | None = None
    summary: str | None = None


class Respond(Common):
    """Define the body of /v1/responses."""

    input: str | Annotated[list[Said | Thought | Called | Returned], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None


RENAMED = {"max_completion_tokens": "max_output_tokens", "messages": "input"} | {
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
}


def chat_of(body: Respond) -> Chat:
    """Return the chat that a response continues."""
    if body.previous_response_id is not None:
        message = "This server keeps no responses: send the earlier items in input, and leave previous_response_id out."
        raise ApiError(message, "previous_response_id")
    given: dict[str, Any] = {name: getattr(body, name) for name in Common.model_fields}
    given |= {"messages": _messages(body), "max_completion_tokens": body.max_output_tokens}
    if body.reasoning is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if isinstance(body.tool_choice, NamedChoice):
        given["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tools or body.tool_choice == "required":  # Clients send the others with every request.
        given["tool_choice"] = body.tool_choice
    if body.tools:
        given["parallel_tool_calls"] = body.parallel_tool_calls
        tools = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools]
        given["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if body.text is not None and body.text.format is not None:
        schema = body.text.format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        given["response_format"] = {"type": body.text.format.type} | (
            {"json_schema": schema} if "schema" in schema else {}
        )
    return Chat.model_validate(given)


def _messages(body: Respond) -> list[dict[str, Any]]:
    """Return the messages of a chat; an answer's reasoning, text and calls are one message."""
    found: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for item in [Said(role="user", content=body.input)] if isinstance(body.input, str) else body.input:
        last = found[-1] if found and found[-1]["role"] == "assistant" else None
        if isinstance(item, Returned):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif isinstance(item, Thought):
            thoughts = "".join(part.text for part in item.content)
            found.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        elif isinstance(item, Called):
            if last is None:
                found.append(last := {"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif last is not None and item.role == "assistant" and not (last["content"] or "tool_calls" in last):
            last["content"] = _content(item.content)
        else:
            found.append({"role": item.role, "content": _content(item.content)})
    return found


def _content(content: str | Sequence[Text | Shown]) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Text | Shown) -> dict[str, Any]:
    if isinstance(part, Shown):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text}


PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # Clients tell items by those of their ids.


class Writer:
    """Build the items of a response from the parts of a chat's message, and the events that stream them."""

    def __init__(self, call: Call, body: Respond) -> None:
        self._call, self._body = call, body
        self.items: list[dict[str, Any]] = []
        self._numbers = itertools.count()
        self._goes_on = False  # The last item is a text that may go on.

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return a server-sent event."""
        written = {"type": f"response.{kind}", "sequence_number": next(self._numbers)} | fields
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), to_json(written))

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the last item."""
        return self.event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def add(self, found: dict[str, Any]) -> Iterator[bytes]:
        """Add parts of a message; yield their events."""
        for kind, field in (("reasoning", "reasoning_content"), ("message", "content")):
            if found.get(field):
                yield from self._add_text(kind, found[field])
        for one in found.get("tool_calls", ()):
            written = one["function"]
            yield from self._begin("function_call", call_id=one["id"], name=written["name"], arguments="")
            yield self._of_item("function_call_arguments.delta", delta=written["arguments"])
            self.items[-1] |= {"arguments": written["arguments"], "status": "completed"}
            yield self._of_item("function_call_arguments.done", **written)
            yield self._of_item("output_item.done", item=self.items[-1])

    def _begin(self, kind: str, **own: Any) -> Iterator[bytes]:
        yield from self.end()
        self.items.append({"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"} | own)
        yield self._of_item("output_item.added", item=self.items[-1])

    def _add_text(self, kind: str, text: str) -> Iterator[bytes]:
        if not (self._goes_on and self.items[-1]["type"] == kind):
            own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._begin(kind, content=[], **own)
            own = {"annotations": [], "logprobs": []} if kind == "message" else {}
            name = "output_text" if kind == "message" else "reasoning_text"
            self.items[-1]["content"], self._goes_on = [{"type": name, "text": ""} | own], True
            yield self._of_item("content_part.added", content_index=0, part=self.items[-1]["content"][0])
        part = self.items[-1]["content"][0]
        part["text"] += text
        yield self._of_item(f"{part['type']}.delta", content_index=0, delta=text, logprobs=[])

    def end(self, status: str = "completed") -> Iterator[bytes]:
        """End the text under way, if any; yield its events."""
        if self._goes_on:
            part, self.items[-1]["status"], self._goes_on = self.items[-1]["content"][0], status, False
            yield self._of_item(f"{part['type']}.done", content_index=0, text=part["text"], logprobs=[])
            yield self._of_item("content_part.done", content_index=0, part=part)
            yield self._of_item("output_item.done", item=self.items[-1])

    def response(self, status: str, outputs: Sequence[RequestOutput] = (), error: Any = None) -> dict[str, Any]:
        """Return the response object, with usage if there are `outputs`."""
        body, call = self._body, self._call
        shown = {"instructions", "max_output_tokens", "metadata", "reasoning", "temperature", "text", "top_p", "user"}
        shown |= {"tool_choice", "tools"}
        found: dict[str, Any] = {"id": f"resp_{call.id}", "object": "response", "created_at": call.created}
        found |= {"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "store": False}
        found |= body.model_dump(include=shown, exclude_none=True, by_alias=True)
        found |= {"model": call.model, "status": status, "output": self.items, "error": error}
        found["parallel_tool_calls"] = body.parallel_tool_calls is not False
        found["incomplete_details"] = {"reason": "max_output_tokens"} if status == "incomplete" else None
        if outputs:
            used = usage(call, outputs)
            thoughts = "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")
            reasoned = len(call.tokenizer(thoughts, add_special_tokens=False).input_ids) if thoughts else 0
            found["usage"] = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoned},
                "total_tokens": used["total_tokens"],
            }
            found |= {"draftree": statistics(outputs)} if body.own.stats else {}
        return found


def whole_response(call: Call, body: Respond, delta: Delta, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return a response that is not streamed."""
    writer = Writer(call, body)
    found, finish = message_parts(call, delta)
    status = "incomplete" if finish == "length" else "completed"
    for _ in itertools.chain(writer.add(found), writer.end(status)):
        pass
    return writer.response(status, outputs)


async def response_events(call: Call, body: Respond, stream: OutputStream) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a response; an error is an event as well."""
    writer, status = Writer(call, body), "completed"
    try:
        for kind in ("created", "in_progress"):
            yield writer.event(kind, response=writer.response("in_progress"))
        async for delta in stream.deltas(KEEP_ALIVE):
            if delta is None:
                yield b": waiting\n\n"
                continue
            found, finish = message_parts(call, delta)
            status = "incomplete" if finish == "length" else status
            for event in writer.add(found):
                yield event
        for event in writer.end(status):
            yield event
        yield writer.event(status, response=writer.response(status, stream.outputs))
    except BaseException as error:
        stream.cancel()  # The client may leave before the first delta.
        if not isinstance(error, Exception):
            raise
        said = {"code": "server_error", "message": api_error(error).message}
        yield writer.event("failed", response=writer.response("failed", error=said))
