"""Measurement in turns: every way of decoding answers a batch of prompts before the next batch comes.

A slow minute of the machine then hits all ways alike, and the order turns from batch to batch. The time
of reading the prompt is taken separately. Each way keeps its engine, drafter and shape throughout, as a server would;
what it did is one row a batch, and figures are made of those rows afterwards (`Share`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from benchmarks.harness.passes import rows_of_passes
from benchmarks.harness.setup import Setup, Task
from draftree.bench.measure import Share, groups_of
from draftree.drafting import Drafter
from draftree.engine import Engine, RunStats, SamplingParams
from draftree.engine.limits import eos_token_ids
from draftree.engine.request import STAGES
from draftree.shaping import Shape

PLAIN = "plain"
COUNTS = ("steps", "accepted", "drafted", "pruned", "rollbacks")
CAPACITY = 768  # cache columns to begin with, so that no clocked step allocates
Ask = Callable[[Sequence[Sequence[int]]], Sequence[Any]]  # prompts to `draftree.bench.samples.Answer`s


@dataclass(slots=True)
class Way:
    """One way of decoding."""

    name: str  # what tables call it
    # drafter, shape: of the engine; None for plain decoding.
    drafter: Drafter | None = None
    shape: Shape | None = None
    # More of `draftree.Engine`, such as `pruner` or `reject_drafts`.
    options: dict[str, Any] = field(default_factory=dict)
    ask: Ask | None = None  # answers prompts in place of an engine, such as Hugging Face's `generate`
    engine: Engine | None = None  # made when the way first runs
    paper: str = ""  # a paper's figure for it
    single: bool = False  # whether it takes one prompt at a time


def measure(
    setup: Setup,
    ways: Sequence[Way],
    tasks: Sequence[Task] | None = None,
    *,
    batch: int = 1,
    rounds: int = 1,
    stop: bool = True,
    ready: bool = False,
) -> pd.DataFrame:
    """Answer all tasks with every way, `batch` prompts together; return a row for each way, round and batch.

    Args:
        setup: model, most tokens of an answer (`max_new_tokens`), and a watcher, which shows every batch of every way.
        ways: of decoding.
        tasks: prompts, those of the setup where none are given; those that do not fill a batch are left out.
        batch: prompts together.
        rounds: how often they are answered.
        stop: end at EOS; else every answer has its most tokens, and the clock stops when the first of a batch is
            complete.
        ready: let every way answer the longest batch first, uncounted, for what only first calls pay.

    Returns:
        columns `way`, `round`, `group`, `set`, `prompt_seconds`, `prompt_tokens`, `seconds`, `tokens`, `COUNTS`, the
        stages, `passes`, `rows` (of passes; those that join half-way count in part), `left_seconds` and `left_tokens`
        (after the clock stopped), `ids` (of every answer).
    """
    tasks = setup.tasks if tasks is None else tasks
    groups = [[tasks[i] for i in group] for group in groups_of(tasks, batch)]
    if not groups:
        raise ValueError(f"{len(tasks)} prompts do not fill a batch of {batch}: give more prompts, or a smaller batch.")
    params = SamplingParams(setup["max_new_tokens"], eos_token_ids(setup.model) if stop else ())
    for way in ways:
        if way.ask is None and way.engine is None:
            given = {"drafter": way.drafter, "shape": way.shape, "capacity": CAPACITY, **way.options}
            way.engine = Engine(setup.model, slots=batch, **given)
        if ready:
            _answer(way, max(groups, key=lambda group: max(len(task.ids) for task in group)), params)
    setup.watcher.stage("measuring", len(groups) * len(ways) * rounds)
    rows: list[dict[str, Any]] = []
    for turn in range(rounds):
        for number, group in enumerate(groups):
            first = (turn * len(groups) + number) % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                facts = {"way": way.name, "round": turn, "group": number, "set": group[0].prompt.set}
                rows.append(facts | _answer(way, group, params))
                setup.watcher.step()
    order = {way.name: place for place, way in enumerate(ways)}
    by = ["way", "round", "group"]
    return pd.DataFrame(rows).sort_values(by, key=lambda c: c.map(order) if c.name == "way" else c)


def _answer(way: Way, group: Sequence[Task], params: SamplingParams) -> dict[str, Any]:
    if way.ask is not None:
        return _answer_without_engine(way.ask, group)
    engine = way.engine
    assert engine is not None
    begin = time.perf_counter()
    requests = [engine.add(task.ids, params) for task in group]
    engine.step()
    while engine.busy and not all(request.output or request.error for request in requests):
        engine.step()  # further parts of long prompts
    row: dict[str, Any] = {"prompt_seconds": time.perf_counter() - begin}
    before = RunStats([request.stats for request in requests]).total
    row["prompt_tokens"] = before.emitted
    spent, passes = 0.0, 0
    with rows_of_passes(engine.runner) as rows:
        while len(engine.running) == len(group) or (engine.busy and params.eos_token_ids):
            begin = time.perf_counter()
            engine.step()
            spent += time.perf_counter() - begin
            passes += 1
    last = RunStats([request.stats for request in requests]).total
    row |= {"seconds": spent, "tokens": last.emitted - before.emitted, "rows": sum(rows), "passes": passes}
    row |= {name: getattr(last, name) - getattr(before, name) for name in COUNTS}
    row |= {stage: last.seconds[stage] - before.seconds[stage] for stage in STAGES}
    begin = time.perf_counter()
    engine.run()  # what is left of answers of equal length, in a batch that is no longer full
    row |= {
        "left_seconds": time.perf_counter() - begin,
        "left_tokens": sum(r.stats.emitted for r in requests) - last.emitted,
    }
    for request in requests:
        if request.error is not None:
            raise request.error
    return row | {"ids": [request.tokens for request in requests]}


def _answer_without_engine(ask: Ask, group: Sequence[Task]) -> dict[str, Any]:
    answers = ask([task.ids for task in group])
    stats = RunStats([one.stats for one in answers if one.stats is not None]).total  # zeros where a way reports none
    row = dict.fromkeys(("prompt_seconds", "prompt_tokens", "left_seconds", "left_tokens", "passes", "rows"), 0)
    row |= {name: getattr(stats, name) for name in COUNTS} | stats.seconds
    row |= {"seconds": sum(a.seconds for a in answers), "tokens": sum(len(a.ids) for a in answers)}
    return row | {"ids": [list(a.ids) for a in answers]}


# -------------------------------------------------------------------- figures


def of(runs: pd.DataFrame, way: str, sets: str | None = None) -> pd.DataFrame:
    """Return the rows of one way by batch, with rounds summed; of one set if it is named."""
    own = runs[runs["way"] == way]
    own = own if sets is None else own[own["set"] == sets]
    return own.groupby("group").sum(numeric_only=True)


def length(run: pd.DataFrame) -> Share:
    """Return the acceptance length, 1 + accepted / steps."""
    return Share(run["accepted"], run["steps"], 1.0)


def per_token(run: pd.DataFrame) -> Share:
    """Return the seconds a token of decoding, without prefill."""
    return Share(run["seconds"], run["tokens"])


def whole(run: pd.DataFrame) -> Share:
    """Return seconds a token of whole answers: prompts read, and the last answer of a batch complete."""
    seconds = run["seconds"] + run["prompt_seconds"] + run["left_seconds"]
    return Share(seconds, run["tokens"] + run["prompt_tokens"] + run["left_tokens"])


def size(run: pd.DataFrame) -> float:
    """Return the draft tokens of a request and step."""
    return float(run["drafted"].sum() / max(run["steps"].sum(), 1))


def differing(runs: pd.DataFrame, way: str, plain: pd.DataFrame | None = None, reference: str = PLAIN) -> int:
    """Return the number of prompts of a way whose answers are not the reference's."""
    plain = runs if plain is None else plain
    truth = {row.group: row.ids for row in plain[plain["way"] == reference].itertuples()}
    own = runs[runs["way"] == way]
    return sum(a != b for row in own.itertuples() for a, b in zip(row.ids, truth[row.group], strict=True))


def all_differing(runs: pd.DataFrame, plain: pd.DataFrame | None = None, reference: str = PLAIN) -> int:
    """Return the number for all ways together."""
    return sum(differing(runs, str(way), plain, reference) for way in runs["way"].unique())
