"""How near replay comes to real runs: the same candidates on the same prompts, once from the record and once live.

Trees sized by cost are replayed twice: by the times that replay predicts, and by those that the real run's steps took.
The second must give the run's own trees; what is left between the two is how well times are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.shaping import Shape
from draftree.tuning.file import Spec, shape_of
from draftree.tuning.listening import Listening
from draftree.tuning.record import Record
from draftree.tuning.replay import Replayed, Times
from draftree.tuning.search import Judged, TuningOptions, prepare, run_live
from draftree.tuning.space import Candidate, Space, trained_of

SIZES: tuple[int | None, ...] = (4, 16, None)


@dataclass(frozen=True, slots=True)
class Checked:
    """A candidate's acceptance length, predicted and real.

    Attributes:
        candidate: which.
        live, replayed: 1 + accepted / steps of the real run and of the replay.
        by_its_times: the same of a replay whose shape sees the real run's step times; None for trees of fixed size.
        worst_set: the set on which they are furthest apart, and predicted over real there.
        live_speed, replayed_speed: tokens a second.
        prompts: how many were answered.
    """

    candidate: Candidate
    live: float
    replayed: float
    by_its_times: float | None
    worst_set: tuple[str, float]
    live_speed: float
    replayed_speed: float
    prompts: int


def check_replay(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: TuningOptions, watcher: Watcher
) -> list[Checked]:
    """Compare for cold and warm tries, prompt lookup, trained drafters and merges of both.

    Args:
        model, tokenizer: a decoder-only model and its tokenizer.
        prompts: `options.per_set` of every set; a half each teach tries and are answered.
        options: lengths and drafters; the time is not used.
        watcher: hears of progress.

    Raises:
        ValueError: prompts or drafters that cannot be used, before any work.
    """
    prepared = prepare(model, tokenizer, prompts, options)
    record = Record(model, options.max_new_tokens, trained_of(options.specs, model, tokenizer))
    tasks = prepared.search if prepared.search is prepared.judge else [*prepared.search, *prepared.judge]
    watcher.stage("recording", len(tasks) + len(prepared.lessons))
    for task in prepared.lessons:
        record.lesson(task)
        watcher.step()
    for task in tasks:
        record.text(task)
        watcher.step()
    space = Space(record, options.specs, tokenizer)
    cold, warm = Spec("lookahead"), Spec("lookahead", warm=True)
    odd = Spec("lookahead", {"branch_length": 6, "max_query_length": 2, "capacity": 2, "prompt_weight": 1.0})
    specs = [cold, *([warm] if record.lessons else []), odd, Spec("prompt-lookup"), *options.specs]
    specs += [Spec("merge", parts=(cold, spec)) for spec in options.specs]
    candidates = [Candidate(spec, size) for spec in specs if space.can_replay(spec) for size in SIZES]
    shapes: dict[str, Listening] = {}

    def shape(one: Candidate) -> Shape:
        if one.node_budget is not None:
            return shape_of(one.node_budget)
        shapes[one.name] = Listening(shape_of(None))  # the last one made is that of the round
        return shapes[one.name]

    judged = run_live(space, candidates, record.texts, watcher, shape=shape)
    found = []
    for one in judged:
        again = None
        if one.candidate.name in shapes:
            again = space.predict(one.candidate, record.texts, times=times_of(shapes[one.candidate.name]))
        if one.predicted is not None:
            found.append(_checked(one, again))
    return found


def times_of(shape: Listening) -> Times:
    """What the steps of a run took, for its replay."""
    assert shape.cost is not None
    return Times(shape.cost, [(outcome.seconds, outcome.drafting) for outcome in shape.outcomes])


def _checked(one: Judged, again: Replayed | None) -> Checked:
    stats, replayed = one.row.stats, one.predicted
    assert stats is not None
    assert replayed is not None
    by_set = {
        name: replayed.by_set[name].acceptance_length / row.stats.acceptance_length
        for name, row in one.row.by_set.items()
        if row.stats is not None
    }
    worst = max(by_set, key=lambda name: abs(by_set[name] - 1))
    return Checked(
        one.candidate,
        stats.acceptance_length,
        replayed.stats.acceptance_length,
        None if again is None else again.stats.acceptance_length,
        (worst, by_set[worst]),
        one.row.speed.value,
        replayed.speed,
        one.prompts,
    )
