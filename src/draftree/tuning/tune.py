"""Successive halving: all candidates decode a few prompts, the slower half leaves, the rest decodes twice as many.

The candidates decode each prompt one after the other, in rotating order, so that a slow minute of the machine affects
all alike. Plain decoding takes part in every round as the reference. No candidate decodes a prompt twice: a drafter
that learns would know the answer.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftree.bench.measure import encode_tasks
from draftree.bench.methods import Draftree
from draftree.engine import RequestStats
from draftree.prompts import Prompt, Watcher, take_per_set
from draftree.shaping import DynamicTree, Fixed, Shape
from draftree.tuned import make_drafter

SIZES: tuple[int | None, ...] = (None, 4, 16)  # draft tokens of a step; None sizes trees by cost
FREE = ("lookahead", "prompt-lookup")  # drafters that need no training; they are always measured


@dataclass(frozen=True)
class Candidate:
    """A drafter with a tree size."""

    drafters: tuple[str, ...] = ()  # Names to merge; empty for plain decoding.
    node_budget: int | None = None  # Draft tokens of every step; None for trees sized by cost.

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
    """A candidate and its measurements."""

    candidate: Candidate  # The drafter and tree size.
    answer: Callable[[Sequence[int]], RequestStats]  # Decodes one prompt of token ids and returns its statistics.
    seconds: list[float] = field(default_factory=list)  # Wall time of each prompt.
    stats: list[RequestStats] = field(default_factory=list)  # Statistics of each prompt.

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


def make_runner(model: Any, tokenizer: Any, candidate: Candidate, new: int) -> Runner:
    """Return the runner of a candidate, with a drafter that lives from prompt to prompt, as it does in a server."""
    drafter = make_drafter(candidate.drafters, model, tokenizer)
    shape: Shape | None = None
    if drafter is not None:
        shape = DynamicTree() if candidate.node_budget is None else Fixed(candidate.node_budget)
    method = Draftree(candidate.label, model, new, lambda: drafter, lambda: shape)
    return Runner(candidate, lambda ids: method.answer(ids).stats or RequestStats())


FIRST_ROUND = 4  # prompts of the first round; fewer if there are not enough for all rounds
ENOUGH = 8  # prompts before differences can count as noise

Clock = Callable[[], float]


@dataclass(frozen=True)
class Result:
    """A candidate's figures over all prompts that it decoded."""

    candidate: Candidate  # The drafter and tree size.
    rounds: int  # The rounds that it took part in; only candidates with the same number decoded the same prompts.
    prompts: int  # The number of prompts.
    tokens_per_second: float  # New tokens per second of wall time, prompt included.
    ratio: float  # Its speed relative to plain decoding of the same prompts.
    acceptance_length: float  # 1 + accepted / steps.

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        figures = {"tokens_per_second": self.tokens_per_second, "ratio": self.ratio}
        rounded = {name: round(value, 4) for name, value in figures.items()}
        rounded["acceptance_length"] = round(self.acceptance_length, 4)
        return {"candidate": self.candidate.label, "rounds": self.rounds, "prompts": self.prompts} | rounded


def tune(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    drafters: Sequence[str] = (),
    *,
    minutes: float = 5.0,
    max_new_tokens: int = 96,
    watcher: Watcher | None = None,
) -> list[Result]:
    """Measure the candidates on `prompts` and return their results, the fastest first."""
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes is {minutes:g}: give a finite number over 0.")
    if len(prompts) < 2:
        raise ValueError("Tuning takes two prompts or more, the first for warm-up: give more prompts.")
    watcher = watcher or Watcher()
    tasks = encode_tasks(tokenizer, model, take_per_set(prompts, len(prompts)), max_new_tokens)
    first, *rest = [task.ids for task in tasks]
    runners = [make_runner(model, tokenizer, one, max_new_tokens) for one in list_candidates(drafters)]
    end = time.perf_counter() + 60 * minutes
    watcher.stage("warming up", len(runners))
    for one in runners:
        one.answer(first)
        watcher.step()
    return halve(runners, rest, watcher, end)


def halve(
    runners: Sequence[Runner],
    prompts: Sequence[Sequence[int]],
    watcher: Watcher,
    end: float = math.inf,
    clock: Clock = time.perf_counter,
) -> list[Result]:
    """Halve the candidates until one is left, the rest differ by noise alone, or prompts or time run out.

    Returns:
        The results; candidates of later rounds first, and in a round the faster before the slower ones.
    """
    plain = next(one for one in runners if one.candidate == PLAIN)
    alive = list(runners)
    left: list[Result] = []
    rounds = max(1, math.ceil(math.log2(len(runners))))
    count = max(1, min(FIRST_ROUND, len(prompts) // (2**rounds - 1)))
    done = number = 0
    while True:
        number += 1
        batch = prompts[done : done + count]
        watcher.stage(f"measuring {len(alive)} candidates", len(batch) * len(alive))
        for ids in batch:
            turn = done % len(alive)
            for one in [*alive[turn:], *alive[:turn]]:
                one.measure(ids, clock)
                watcher.step()
            done += 1
            if clock() > end:
                break
        alive.sort(key=lambda one: -one.speed())
        drafting = [one for one in alive if one is not plain]
        over = done >= len(prompts) or clock() > end
        if over or len(drafting) < 2 or (done >= ENOUGH and all(_alike(alive[0], one) for one in alive[1:])):
            return [_result(one, plain, number) for one in alive] + left
        slower = drafting[math.ceil(len(drafting) / 2) :]
        left = [_result(one, plain, number) for one in slower] + left
        alive = [one for one in alive if one not in slower]
        count *= 2


def _alike(a: Runner, b: Runner) -> bool:
    """Return whether two candidates' times on the same prompts differ by less than two standard errors."""
    logs = [math.log(x / y) for x, y in zip(a.seconds, b.seconds, strict=True)]
    return abs(statistics.fmean(logs)) <= 2 * statistics.stdev(logs) / math.sqrt(len(logs))


def _result(one: Runner, plain: Runner, rounds: int) -> Result:
    count, speed = len(one.seconds), one.speed()
    return Result(one.candidate, rounds, count, speed, speed / plain.speed(count), one.acceptance_length)
