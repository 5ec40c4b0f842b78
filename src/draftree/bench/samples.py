"""What a measurement is made of: prompts as token ids, how tokens are sampled, and the answers of every method."""

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
    """How tokens are sampled; methods that have no such value decode greedily.

    Attributes:
        temperature, top_k, top_p: as in Hugging Face.
        seed: of the noise; prompt b of a batch has seed + b in draftree, while Hugging Face draws all from one stream.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """The options of Hugging Face's `generate`, without the seed."""
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def samplings_of(
    temperatures: Sequence[float], top_k: int | None, top_p: float | None, seed: int
) -> tuple[Sampling | None, ...]:
    """One for each temperature, None for 0.

    Raises:
        ValueError: top-k or top-p without a temperature over 0, where they would have no effect.
    """
    if not any(temperatures) and (top_k is not None or top_p is not None):
        raise ValueError(
            "--top-k and --top-p shape draws, and every --temperature is 0: give one over 0, or leave them."
        )
    return tuple(Sampling(heat, top_k, top_p, seed) if heat else None for heat in dict.fromkeys(temperatures))


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered.

    Attributes:
        ids: new token ids, an EOS included.
        seconds: wall time of the call, the prompt's pass included; each prompt of a batch counts an equal part.
        stats: the engine's counts; None for Hugging Face's methods.
        lengths: new tokens of every step.
        prompt_verify: seconds of the pass that read the prompt; 0 for Hugging Face's methods.
    """

    ids: list[int]
    seconds: float
    stats: RequestStats | None = None
    lengths: tuple[int, ...] = ()
    prompt_verify: float = 0.0


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
    """One answer.

    Attributes:
        method: name of the method that answered.
        task, turn: numbers of the prompt and of its turn, from 0.
        round: number of the round.
        answer: the answer.
        ids: the prompt of a later turn, with the method's own answers in it; None for the task's.
    """

    method: str
    task: int
    round: int
    answer: Answer
    turn: int = 0
    ids: list[int] | None = None
