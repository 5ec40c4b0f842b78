"""What the experiments of `draftree bench propd` are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftree.bench.harness import Task
from draftree.drafting import Drafter, Lookahead
from draftree.engine import generate
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.pruning import EarlyHead

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class ProPDSettings:
    """How much to measure.

    Attributes:
        per_set: prompts of every set.
        max_new_tokens: most tokens of an answer.
        nodes: guesses a step where a tree is static.
        sizes: static trees that a dynamic one is set against.
        top_k: of early pruning.
        batch: sizes of batches.
        warm_per_set: other prompts of every set, which a warm trie has seen answered.
    """

    per_set: int = 4
    max_new_tokens: int = 96
    nodes: int = 32
    sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    top_k: tuple[int, ...] = (1, 2, 4, 8, 16, 50)
    batch: tuple[int, ...] = (1, 2, 4, 8, 16)
    warm_per_set: int = 8

    def __post_init__(self) -> None:
        for name in ("per_set", "max_new_tokens", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more.")
        if self.warm_per_set < 0:
            raise ValueError(f"warm_per_set is {self.warm_per_set}: give 0 (an empty trie) or more.")
        for name in ("sizes", "top_k", "batch"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} is {list(getattr(self, name))}: give at least one number, each 1 or more.")


@dataclass(frozen=True, slots=True)
class ProPDSetup:
    """All that an experiment is given.

    Attributes:
        model: a decoder-only model.
        drafters: by name, how to make one as it is before the first prompt.
        heads: early heads, by layer.
        tasks: prompts to measure on.
        foreign: by name, the same for drafters that know nothing of these texts, for the worst case.
        settings: how much.
        watcher: hears of progress.
    """

    model: Any
    drafters: dict[str, Callable[[], Drafter]]
    heads: Sequence[EarlyHead]
    tasks: Sequence[Task]
    foreign: dict[str, Callable[[], Drafter]]
    settings: ProPDSettings
    watcher: Watcher

    def make(self, name: str) -> Drafter:
        """A drafter of that name, as it is before the first prompt."""
        return self.drafters[name]()


def answers_to(model: Any, tokenizer: Any, prompts: Sequence[Prompt], new: int, watcher: Watcher) -> list[list[int]]:
    """Answers of `model` to prompts beside the measured ones, at most `new` tokens each, for a trie to have seen."""
    watcher.stage("answers for the trie", len(prompts))
    teacher, texts = Lookahead(), []
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt.text)
        out = generate(model, torch.tensor([ids]), drafter=teacher, max_new_tokens=new)
        texts.append(out.sequences[0, len(ids) :].tolist())
        watcher.step()
    return texts


def warm_trie(texts: Sequence[Sequence[int]], **options: Any) -> Lookahead:
    """A trie, of these options, that has seen `texts`."""
    drafter = Lookahead(**options)
    drafter.warm(texts)
    return drafter
