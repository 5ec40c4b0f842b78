"""What a measurement is given: a model, prompts as token ids, and how much of everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftree.bench.checkout import from_checkout
from draftree.bench.machine import describe
from draftree.bench.samples import Sampling, Task, encode_tasks
from draftree.drafting.folder import model_hash
from draftree.models import load_model
from draftree.placement import Placement
from draftree.prompts import Prompt, split_prompts
from draftree.runner import inspect_model

TURN_ROOM = 32  # tokens that a chat template may put around a turn


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured."""

    model: Any
    tokenizer: Any
    name: str | None = None  # the folder or hub name that it was loaded from; None for the embedded model
    # What `model` was inflated from, for which the package's drafters were trained; None where it was not.
    small: Any = None
    size: str = ""  # what it was inflated to, such as "400M"; "" where it was not
    placement: Placement = field(default_factory=Placement)  # device and type that it was loaded for

    @classmethod
    def load(cls, name: str | None, placement: Placement | None = None) -> Subject:
        """The model of a folder or hub name; the embedded one for None.

        A folder may hold a model that was inflated from the embedded one: the package's drafters fit it then.

        Raises:
            ValueError: a folder that does not exist or cannot be loaded, or no such device or type.
        """
        held = cls(*load_model(name, placement), name, placement=placement or Placement())
        origin = getattr(held.model.config, "inflated_from", None)
        if isinstance(origin, dict):
            embedded, _ = load_model(None)
            if origin.get("hash") == model_hash(embedded):
                return replace(held, small=embedded)
        return held

    def inflated(self, size: str | None, **options: Any) -> Subject:
        """The model inflated to about `size` parameters, or by other `options` of `inflate`; itself for None.

        Its weights are rounded to bfloat16, in which most checkpoints are published.

        Raises:
            TypeError, ValueError: of `inflate`; there is no checkout, in which that lies.
        """
        if size is None:
            return self
        if self.small is not None:
            raise ValueError("This model has been inflated already: inflate the one that it was made from.")
        large = from_checkout("inflate").inflate(self.model, published=torch.bfloat16, **(options or {"params": size}))
        return replace(self, model=large, small=self.model, size=size)

    @property
    def trained_for(self) -> Any:
        """The model that drafters of the package and tries are made with: the one before it was inflated."""
        return self.model if self.small is None else self.small

    def fitted(self, drafter: Any) -> Any:
        """A drafter for `trained_for` as one for the model."""
        return drafter if self.small is None else from_checkout("inflate").inflate_drafter(drafter, self.model)

    def about(self) -> dict[str, Any]:
        """What a result file says of where and how it was made: see `describe`."""
        facts = describe(self.model, self.name)
        return facts | ({"model": f"{facts['model']} inflated to {self.size}"} if self.size else {})


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    per_set: int = 4  # prompts of every set to measure on
    max_new_tokens: int = 96  # most tokens of an answer
    rounds: int = 2  # how often every prompt is answered
    warm_per_set: int = 23  # prompts of every set to warm the trie with
    compiled: bool = True  # whether to measure torch.compile
    batch: int = 1  # prompts answered together
    sampling: Sampling | None = None  # how tokens are sampled; None decodes greedily

    @property
    def title(self) -> str:
        """Batch and sampling in a few words."""
        drawn = self.sampling
        if drawn is None:
            return f"batch {self.batch}, greedy"
        cuts = "".join(f", top-{k} {v}" for k, v in (("k", drawn.top_k), ("p", drawn.top_p)) if v is not None)
        return f"batch {self.batch}, sampled at temperature {drawn.temperature:g}{cuts}, seed {drawn.seed}"


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as token ids."""

    tasks: list[Task]  # to measure on
    lessons: list[list[int]]  # to warm a trie with
    longest: list[int]  # for each task, the most tokens that the prompt of its last turn may have

    @property
    def sets(self) -> list[str]:
        """Names of the measured sets."""
        return list(dict.fromkeys(task.prompt.set for task in self.tasks))


def encode_all(subject: Subject, prompts: Sequence[Prompt], settings: Settings) -> Texts:
    """The prompts that `settings` ask for, as token ids, and checked.

    Raises:
        ValueError: a model or prompt that cannot be measured, before any work.
    """
    target, tokenizer, new = inspect_model(subject.model), subject.tokenizer, settings.max_new_tokens
    if target.encoder_decoder:
        raise ValueError("This benchmark measures decoder-only models: this one has an encoder.")
    measured, warming = split_prompts(prompts, settings.per_set, settings.warm_per_set)
    if len(measured) < settings.batch:
        raise ValueError(
            f"{len(measured)} prompts do not fill a batch of {settings.batch}: give more prompts, or a smaller batch."
        )
    tasks = encode_tasks(tokenizer, subject.model, [*measured, *warming], new)
    longest = []
    for task in tasks[: len(measured)]:
        later = [len(tokenizer(text).input_ids) for text in task.prompt.later]
        longest.append(len(task.ids) + sum(later) + len(later) * (TURN_ROOM + new))
        if later and target.max_positions is not None and longest[-1] + new > target.max_positions:
            raise ValueError(
                f"Prompt {task.prompt.id!r}: its turns may grow to {longest[-1] + new} tokens and the model's context "
                f"is {target.max_positions}: lower max_new_tokens, or leave turns out."
            )
    return Texts(tasks[: len(measured)], [task.ids for task in tasks[len(measured) :]], longest)
