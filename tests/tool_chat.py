"""Tools and tokenizers with chat templates that call them, for tests of the server."""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.machine.schemas import record

LOOK = {"name": "look", "parameters": record(at={"enum": ["sea", "sky"]}), "strict": True}
ADD = {"name": "add", "parameters": record(a={"type": "integer", "minimum": 0, "maximum": 99}, b={"enum": [1, 2]})}
TOOLS: Any = [{"type": "function", "function": function} for function in (LOOK, ADD)]
ARGUMENTS = {function["name"]: function["parameters"] for function in (LOOK, ADD)}
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}Tool {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {{ start or '' }}"
)

CALLS = {"close": "</call>", "repeats": True, "content": "json"} | {
    "transform": {"type": "function", "function": "{content}"}
}

THINKING = {"open": "<think>", "close": "</think>"}


def talking(tokenizer: Any, opening: Any = "<call>", **fields: Any) -> Any:
    """Return the tokenizer with templates for tools; `opening` marks calls, or is a field of the template."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = CHAT_TEMPLATE
    calls = CALLS | (opening if isinstance(opening, dict) else {"open": opening})
    made.response_template = {
        "start_anchor": "assistant: ",
        "fields": {**fields, "tool_calls": calls, "content": {"close": "</s>"}},
    }
    return made


TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}A: "
)

RESPONSE = {
    "start_anchor": "A: ",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Talker:
    """A tokenizer with a chat template and a response template; its ids are code points."""

    chat_template = TEMPLATE
    response_template = RESPONSE

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(map(chr, ids))
