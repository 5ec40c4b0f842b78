"""How near replay comes to real runs: the same candidates on the same prompts, once from the record and once live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.bench.harness import Watcher
from draftree.bench.prompts import Prompt
from draftree.bench.tune import Judged, Wishes, prepare, run_live
from draftree.bench.tune_file import Spec
from draftree.bench.tune_record import Recorder
from draftree.bench.tune_space import Candidate, Space, trained_of

SIZES: tuple[int | None, ...] = (4, 16, None)


@dataclass(frozen=True, slots=True)
class Checked:
    """A candidate's acceptance length, predicted and real.

    Attributes:
        candidate: which.
        live, replayed: 1 + accepted / steps of the real run and of the replay.
        worst_set: the set on which they are furthest apart, and predicted over real there.
        live_speed, replayed_speed: tokens a second.
        prompts: how many were answered.
    """

    candidate: Candidate
    live: float
    replayed: float
    worst_set: tuple[str, float]
    live_speed: float
    replayed_speed: float
    prompts: int


def check_replay(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], wishes: Wishes, watcher: Watcher
) -> list[Checked]:
    """Compare for cold and warm tries, prompt lookup, trained drafters and merges of both.

    Args:
        model, tokenizer: a decoder-only model and its tokenizer.
        prompts: `wishes.per_set` of every set; a half each teach tries and are answered.
        wishes: lengths and drafters; time is not looked at.
        watcher: hears of progress.

    Raises:
        ValueError: prompts or drafters that cannot be used, before any work.
    """
    prepared = prepare(model, tokenizer, prompts, wishes)
    recorder = Recorder(model, wishes.max_new_tokens, trained_of(wishes.specs, model))
    tasks = prepared.search if prepared.search is prepared.judge else [*prepared.search, *prepared.judge]
    watcher.stage("recording", len(tasks) + len(prepared.lessons))
    for task in prepared.lessons:
        recorder.lesson(task)
        watcher.step()
    for task in tasks:
        recorder.text(task)
        watcher.step()
    space = Space(recorder, wishes.specs, tokenizer)
    cold, warm = Spec("lookahead"), Spec("lookahead", warm=True)
    odd = Spec("lookahead", {"branch_length": 6, "max_query_length": 2, "capacity": 2, "prompt_weight": 1.0})
    specs = [cold, *([warm] if recorder.lessons else []), odd, Spec("prompt-lookup"), *wishes.specs]
    specs += [Spec("merge", parts=(cold, spec)) for spec in wishes.specs]
    candidates = [Candidate(spec, size) for spec in specs if space.can_replay(spec) for size in SIZES]
    return [_checked(one) for one in run_live(space, candidates, recorder.texts, watcher) if one.predicted is not None]


def _checked(one: Judged) -> Checked:
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
        (worst, by_set[worst]),
        one.row.speed.value,
        replayed.speed,
        one.prompts,
    )
