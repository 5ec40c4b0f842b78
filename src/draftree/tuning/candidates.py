"""The candidates of `draftree tune`: plain decoding, and each drafter with each tree size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftree.engine import RequestStats, generate
from draftree.shaping import DynamicTree, Fixed, Shape
from draftree.tuning.file import make_drafter

SIZES: tuple[int | None, ...] = (None, 4, 16)  # draft tokens of a step; None sizes trees by cost
FREE = ("lookahead", "prompt-lookup")  # drafters that need no training; they are always measured


@dataclass(frozen=True)
class Candidate:
    """A drafter with a tree size.

    Attributes:
        drafters: names to merge; empty for plain decoding.
        node_budget: draft tokens of every step; None for trees sized by cost.
    """

    drafters: tuple[str, ...] = ()
    node_budget: int | None = None

    @property
    def label(self) -> str:
        """Return the name in tables."""
        if not self.drafters:
            return "plain"
        size = "sized by cost" if self.node_budget is None else f"{self.node_budget} draft tokens"
        return f"{'+'.join(Path(name).name for name in self.drafters)}, {size}"


PLAIN = Candidate()


def list_candidates(given: Sequence[str]) -> list[Candidate]:
    """Return plain decoding, and the free drafters, the given ones, and lookahead merged with each, in all sizes."""
    drafters: list[tuple[str, ...]] = [(name,) for name in dict.fromkeys((*FREE, *given))]
    drafters += [("lookahead", name) for name in dict.fromkeys(given) if name not in FREE]
    return [PLAIN, *(Candidate(names, size) for names in drafters for size in SIZES)]


@dataclass
class Runner:
    """A candidate and its measurements.

    Attributes:
        candidate: the drafter and tree size.
        answer: decodes one prompt of token ids and returns its statistics.
        seconds: wall time of each prompt.
        stats: statistics of each prompt.
    """

    candidate: Candidate
    answer: Callable[[Sequence[int]], RequestStats]
    seconds: list[float] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list)

    def measure(self, ids: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> None:
        """Decode a prompt and record its time in seconds."""
        begin = clock()
        stats = self.answer(ids)
        self.seconds.append(clock() - begin)
        self.stats.append(stats)

    def speed(self, prompts: int | None = None) -> float:
        """Return tokens per second over the first `prompts` prompts, None for all."""
        return sum(one.emitted for one in self.stats[:prompts]) / max(sum(self.seconds[:prompts]), 1e-9)

    @property
    def acceptance_length(self) -> float:
        """Return 1 + accepted / steps over all prompts."""
        total = RequestStats()
        for one in self.stats:
            total.add(one)
        return total.acceptance_length


def make_runners(model: Any, tokenizer: Any, candidates: Sequence[Candidate], max_new_tokens: int) -> list[Runner]:
    """Return a runner of each candidate, with a drafter that lives from prompt to prompt, as it does in a server.

    Raises:
        ValueError: a drafter is missing or does not fit the model.
    """
    return [Runner(one, _decoder(model, tokenizer, one, max_new_tokens)) for one in candidates]


def _decoder(
    model: Any, tokenizer: Any, candidate: Candidate, max_new_tokens: int
) -> Callable[[Sequence[int]], RequestStats]:
    drafter = make_drafter(candidate.drafters, model, tokenizer)
    shape: Shape | None = None
    if drafter is not None:
        shape = DynamicTree() if candidate.node_budget is None else Fixed(candidate.node_budget)

    def answer(ids: Sequence[int]) -> RequestStats:
        prompt = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
        mask = torch.ones_like(prompt)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        return generate(model, prompt, mask, drafter=drafter, shape=shape, **options).stats.total

    return answer
