"""What a measurement is made of: prompts as token ids, how tokens are sampled, and the answers of every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.engine import RequestStats
from draftree.engine.limits import check_prompt
from draftree.errors import check_least
from draftree.models import encode_prompt
from draftree.prompts import Prompt
from draftree.runner import inspect_model


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; methods that have no such value decode greedily."""

    # temperature, top_k, top_p: as in Hugging Face.
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    # Of the noise; prompt b of a batch has seed + b in draftree, while Hugging Face draws all from one stream.
    seed: int = 0


def decoding_options(sampling: Sampling | None) -> dict[str, Any]:
    """The options of Hugging Face's `generate`, without the seed; greedy for None, whatever a config says."""
    if sampling is None:
        return {"do_sample": False}
    # Nothing is cut off where nothing is asked for, whatever a model's own config says.
    cuts = {"top_k": sampling.top_k or 0, "top_p": 1.0 if sampling.top_p is None else sampling.top_p}
    return {"do_sample": True, "temperature": sampling.temperature} | cuts


def samplings_of(
    temperatures: Sequence[float], top_k: int | None, top_p: float | None, seed: int
) -> tuple[Sampling | None, ...]:
    """One for each temperature, None for 0.

    Raises:
        ValueError: top-k or top-p without a temperature over 0, where they would have no effect; a seed beyond 64 bits.
    """
    check_least(-(2**63), 2**63 - 1, seed=seed)
    if not any(temperatures) and (top_k is not None or top_p is not None):
        raise ValueError(
            "--top-k and --top-p shape draws, and every --temperature is 0: give one over 0, or leave them."
        )
    return tuple(Sampling(heat, top_k, top_p, seed) if heat else None for heat in dict.fromkeys(temperatures))


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered."""

    ids: list[int]  # new token ids, an EOS included
    seconds: float  # wall time of the call, the prompt's pass included; each prompt of a batch counts an equal part
    stats: RequestStats | None = None  # the engine's counts; None for Hugging Face's methods
    lengths: tuple[int, ...] = ()  # new tokens of every step
    prompt_verify: float = 0.0  # seconds of the pass that read the prompt; 0 for Hugging Face's methods


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its token ids, made once for all methods."""

    prompt: Prompt
    ids: list[int]


def encode_tasks(tokenizer: Any, model: Any, prompts: Sequence[Prompt], new: int) -> list[Task]:
    """Prompts with their token ids, through the chat template where there is one.

    Raises:
        ValueError: one that `model` cannot answer with `new` tokens; it is named.
    """
    target = inspect_model(model)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
    for task in tasks:
        try:
            check_prompt(task.ids, new, target.vocab_size, target.max_positions)
        except ValueError as error:
            raise ValueError(f"Prompt {task.prompt.id!r}: {error}") from None
    return tasks


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    method: str  # name of the method that answered
    task: int  # number of the prompt
    round: int
    answer: Answer
    turn: int = 0  # of the conversation
    ids: list[int] | None = None  # the prompt of a later turn, with the method's own answers in it; None for the task's
