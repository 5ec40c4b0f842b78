"""Runs of the engine over batches of prompts, for the experiments on early pruning and dynamic trees.

Prompts are answered in batches of neighbours; every way of decoding answers a batch before the next one comes, in
turning order, so that a slow minute hits all of them alike. Prompt passes are left out of the clock: what is
compared is decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftree.bench.analysis_setup import Sampled
from draftree.bench.harness import Task
from draftree.drafting import Drafter
from draftree.engine import Engine, RequestStats, Rules
from draftree.engine.limits import eos_token_ids
from draftree.progress import Watcher
from draftree.pruning import EarlyPruning
from draftree.shaping import Shape

CAPACITY = 768  # cache columns to begin with, so that no clocked step allocates


@dataclass(slots=True)
class Way:
    """One way of decoding.

    Attributes:
        name: what tables call it.
        drafter, shape, pruner: of the engine; None for plain decoding.
        reject: whether guesses are verified and none accepted, the worst case.
    """

    name: str
    drafter: Drafter | None = None
    shape: Shape | None = None
    pruner: EarlyPruning | None = None
    reject: bool = False


@dataclass(slots=True)
class Run:
    """What one way did, a number per batch of prompts.

    Attributes:
        seconds: of its steps behind the prompt passes; where answers do not end early, as long as the batch is full.
        drafting: seconds of them that the draft stage took.
        tokens: emitted in them.
        steps: of them, each request's counted.
        accepted, drafted, pruned: guesses.
        sizes: guesses per request of every step, in order.
        paces: seconds of every step, in order.
        left, left_tokens: seconds from then until the last answer was complete, and tokens emitted in them.
        answers: token ids of every prompt.
    """

    seconds: list[float] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    pruned: list[int] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    left_tokens: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def per_token(self) -> Sampled:
        """Seconds a token."""
        return Sampled.share(np.array(self.seconds), np.array(self.tokens))

    @property
    def per_token_to_the_last(self) -> Sampled:
        """Seconds a token, until the last answer of a batch was complete."""
        return Sampled.share(np.array(self.seconds) + self.left, np.array(self.tokens) + self.left_tokens)

    @property
    def length(self) -> Sampled:
        """Acceptance length, 1 + accepted / steps."""
        return Sampled.share(np.array(self.accepted), np.array(self.steps), plus=1.0)

    @property
    def pruned_share(self) -> Sampled:
        """Pruned guesses of the drafted ones."""
        return Sampled.share(np.array(self.pruned), np.array(self.drafted))

    @property
    def size(self) -> float:
        """Guesses per request and step."""
        return sum(self.drafted) / max(sum(self.steps), 1)


def run_all(
    model: Any,
    ways: Sequence[Way],
    tasks: Sequence[Task],
    batch: int,
    new: int,
    watcher: Watcher,
    *,
    stop: bool = True,
    after_step: Callable[[Way, Engine], None] | None = None,
) -> dict[str, Run]:
    """Answer all tasks with every way, `batch` prompts together; by way, what it did.

    Args:
        model: a decoder-only model.
        ways: of decoding; each keeps its drafter and shape throughout.
        tasks: prompts; those that do not fill a batch are left out.
        batch: prompts together.
        new: most tokens of an answer.
        watcher: hears of every batch of every way.
        stop: end at EOS; else every answer has `new` tokens, and the clock stops when the first of a batch is complete,
            so that batches are full.
        after_step: called with the way and its engine behind every clocked step.
    """
    ends = eos_token_ids(model) if stop else ()
    engines = {
        way.name: Engine(
            model,
            slots=batch,
            drafter=way.drafter,
            shape=way.shape,
            pruner=way.pruner,
            capacity=CAPACITY,
            reject_drafts=way.reject,
        )
        for way in ways
    }
    runs = {way.name: Run() for way in ways}
    groups = [tasks[i : i + batch] for i in range(0, len(tasks) - batch + 1, batch)]
    for number, group in enumerate(groups):
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            answer(engines[way.name], way, runs[way.name], group, Rules(new, ends), after_step)
            watcher.step()
    return runs


def batches(tasks: Sequence[Task], batch: int, ways: int) -> int:
    """How often `run_all` tells its watcher."""
    return len(tasks) // batch * ways


def answer(
    engine: Engine,
    way: Way,
    run: Run,
    group: Sequence[Task],
    rules: Rules,
    after_step: Callable[[Way, Engine], None] | None = None,
) -> None:
    """Answer the prompts of `group` together, and add what that took to `run`."""
    requests = [engine.add(task.ids, rules) for task in group]
    engine.step()  # the prompts
    before = _counts(requests)
    spent = 0.0
    drafted, steps = before.drafted, before.steps
    while len(engine.running) == len(group) or (engine.busy and rules.eos_token_ids):
        mark = time.perf_counter()
        engine.step()
        pace = time.perf_counter() - mark
        now = _counts(requests)
        spent += pace
        run.paces.append(pace)
        run.sizes.append((now.drafted - drafted) / max(now.steps - steps, 1))
        drafted, steps = now.drafted, now.steps
        if after_step is not None:
            after_step(way, engine)
    total = _counts(requests)
    run.seconds.append(spent)
    run.drafting.append(total.seconds["draft"] - before.seconds["draft"])
    run.tokens.append(total.emitted - before.emitted)
    run.steps.append(total.steps - before.steps)
    run.accepted.append(total.accepted - before.accepted)
    run.drafted.append(total.drafted - before.drafted)
    run.pruned.append(total.pruned - before.pruned)
    began = time.perf_counter()
    engine.run()  # what is left of answers of equal length, in a batch that is no longer full
    run.left.append(time.perf_counter() - began)
    run.left_tokens.append(_counts(requests).emitted - total.emitted)
    run.answers += [request.tokens for request in requests]


def _counts(requests: Sequence[Any]) -> RequestStats:
    total = RequestStats()
    for request in requests:
        total.add(request.stats)
    return total


def differing(runs: dict[str, Run], plain: str) -> int:
    """Answers of any way that are not the plain ones."""
    truth = runs[plain].answers
    return sum(ours != theirs for run in runs.values() for ours, theirs in zip(run.answers, truth, strict=True))
