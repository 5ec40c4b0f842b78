"""Tools and tokenizers with chat templates that call them, for tests of the server."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor

from benchmarks.machine.schemas import record
from draftree.serve.grammars import constraint_of
from draftree.serve.protocol import Chat

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


def scripted(tokenizer: Any, prompt: int, said: str) -> Any:
    """Return a tiny GPT-2 that says a text after a prompt of so many tokens, whatever they are, and then EOS."""
    ids = [*tokenizer(said, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    size, length = len(ids), prompt + len(ids) + 200
    config = GPT2Config(
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        n_positions=length,
        n_embd=-(-size // 4) * 4,
        n_layer=1,
        n_head=1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.transformer.ln_f.weight.fill_(1)
        for at in range(length - prompt + 1):
            model.transformer.wpe.weight[min(prompt - 1 + at, length - 1), min(at, size - 1)] = 1
        for at, token in enumerate(ids):
            model.lm_head.weight[token, at] += 1
    return model


class Script(LogitsProcessor):
    """Make any model say a text after a prompt of so many tokens, and then EOS, as far as its grammar permits."""

    def __init__(self, tokenizer: Any, prompt: int, said: str) -> None:
        self._prompt = prompt
        self._ids = [*tokenizer(said, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self._ids[min(input_ids.shape[1] - self._prompt, len(self._ids) - 1)]] = 1e4
        return scores


def says(tokenizer: Any, text: str, begun: str | None = None, **fields: Any) -> bool:
    """Return whether the grammar of a chat with these fields permits `text`."""
    asked = Chat.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS} | fields)
    constraint = constraint_of(
        asked, [tool.model_dump(exclude_none=True) for tool in asked.tools or ()], tokenizer, begun
    )
    assert constraint is not None
    state = constraint.grammar.compile(tokenizer, max(4096, len(tokenizer)), [tokenizer.eos_token_id]).begin()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return all(state.permits(ids[:i], [0, token], [-1, 0])[1] for i, token in enumerate(ids)) and bool(
        state.allowed(ids)[tokenizer.eos_token_id]
    )
