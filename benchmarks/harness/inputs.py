"""What a measurement is given: a model, which may be inflated, prompts as token ids, and how much of everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.inflate import inflate, inflate_drafter
from draftree.bench.measure import Task, encode_tasks
from draftree.bench.report import describe
from draftree.checkpoints import Placement
from draftree.drafting.folder import model_hash
from draftree.models import load_model
from draftree.prompts import Prompt, split_prompts
from draftree.runner import inspect_model


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured."""

    model: Any
    tokenizer: Any
    name: str | None = None  # the folder or hub name that it was loaded from; None for the embedded model
    small: Any = None  # the model that `model` was inflated from, for which the package's drafters were trained
    size: str = ""  # the inflated size, such as "400M"
    placement: Placement = field(default_factory=Placement)  # device and type that it was loaded for

    @classmethod
    def load(cls, name: str | None, placement: Placement | None = None) -> Subject:
        """Return the model of a folder or hub name; the embedded one for None.

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
        """Return the model inflated to about `size` parameters, or by other `options` of `inflate`; itself for None.

        Its weights are rounded to bfloat16, in which most checkpoints are published.

        Raises:
            TypeError, ValueError: of `inflate`.
        """
        if size is None:
            return self
        if self.small is not None:
            raise ValueError("This model has been inflated already: inflate the one that it was made from.")
        large = inflate(self.model, published=torch.bfloat16, **(options or {"params": size}))
        return replace(self, model=large, small=self.model, size=size)

    @property
    def trained_for(self) -> Any:
        """Return the model for which drafters and tries are made: the one before it was inflated."""
        return self.model if self.small is None else self.small

    def fitted(self, drafter: Any) -> Any:
        """Return a drafter for `trained_for` as one for the model."""
        return drafter if self.small is None else inflate_drafter(drafter, self.model)

    def about(self) -> dict[str, Any]:
        """Return what a result file says of where and how it was made: see `describe`."""
        facts = describe(self.model, self.name)
        return facts | ({"model": f"{facts['model']} inflated to {self.size}"} if self.size else {})


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to measure."""

    per_set: int = 4  # measured prompts of every set
    max_new_tokens: int = 96  # most tokens of an answer
    rounds: int = 2  # answers of each prompt
    warm_per_set: int = 23  # prompts of every set whose answers fill the trie
    compiled: bool = True  # whether to measure torch.compile
    batch: int = 1  # prompts answered together
    temperature: float = 0.0  # 0 decodes greedily

    @property
    def title(self) -> str:
        """Return batch and temperature in a few words."""
        how = f"sampled at temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"batch {self.batch}, {how}"


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as token ids."""

    tasks: list[Task]  # to measure on
    lessons: list[list[int]]  # to warm a trie with

    @property
    def sets(self) -> list[str]:
        """Return the names of the measured sets."""
        return list(dict.fromkeys(task.prompt.set for task in self.tasks))


def encode_all(subject: Subject, prompts: Sequence[Prompt], settings: Settings) -> Texts:
    """Return the prompts that `settings` ask for as token ids.

    Raises:
        ValueError: a model or prompt that cannot be measured, before any work.
    """
    if inspect_model(subject.model).encoder_decoder:
        raise ValueError("This benchmark measures decoder-only models: this one has an encoder.")
    measured, warming = split_prompts(prompts, settings.per_set, settings.warm_per_set)
    if len(measured) < settings.batch:
        raise ValueError(
            f"{len(measured)} prompts do not fill a batch of {settings.batch}: give more prompts, or a smaller batch."
        )
    tasks = encode_tasks(subject.tokenizer, subject.model, [*measured, *warming], settings.max_new_tokens)
    return Texts(tasks[: len(measured)], [task.ids for task in tasks[len(measured) :]])
