"""Prompts as token ids, and the answers that methods give to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.engine import RequestStats
from draftree.engine.limits import check_prompt
from draftree.models import encode_prompt
from draftree.prompts import Prompt
from draftree.runner import inspect_model


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt."""

    ids: list[int]  # new token ids, an EOS included
    seconds: float  # wall time of the call, prefill included; each prompt of a batch counts an equal part
    stats: RequestStats | None = None  # the engine's counts; None for Hugging Face's methods


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its token ids."""

    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one method."""

    method: str
    task: int  # number of the prompt
    round: int
    answer: Answer


def encode_tasks(tokenizer: Any, model: Any, prompts: Sequence[Prompt], new: int) -> list[Task]:
    """Return prompts with their token ids, through the chat template if there is one.

    Raises:
        ValueError: `model` cannot answer a prompt with `new` tokens; the message names the prompt.
    """
    target = inspect_model(model)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
    for task in tasks:
        try:
            check_prompt(task.ids, new, target.vocab_size, target.max_positions)
        except ValueError as error:
            raise ValueError(f"Prompt {task.prompt.id!r}: {error}") from None
    return tasks
