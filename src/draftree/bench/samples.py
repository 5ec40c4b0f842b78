"""What a measurement is made of: prompts as token ids, sampling options, and the answers of each method."""

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
class Sampling:
    """Sampling options, as in Hugging Face; None in place of this decodes greedily.

    Prompt b of a batch uses seed + b in draftree; Hugging Face draws all prompts from one stream.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def decoding_options(sampling: Sampling | None) -> dict[str, Any]:
    """Return the options of Hugging Face's `generate` without the seed; a model's own config has no effect."""
    if sampling is None:
        return {"do_sample": False}
    cuts = {"top_k": sampling.top_k or 0, "top_p": 1.0 if sampling.top_p is None else sampling.top_p}
    return {"do_sample": True, "temperature": sampling.temperature} | cuts


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt."""

    ids: list[int]  # new token ids, an EOS included
    seconds: float  # wall time of the call, prefill included; each prompt of a batch counts an equal part
    stats: RequestStats | None = None  # the engine's counts; None for Hugging Face's methods
    lengths: tuple[int, ...] = ()  # new tokens of each step of the engine
    prompt_verify: float = 0.0  # seconds of the engine's pass that read the prompt


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
