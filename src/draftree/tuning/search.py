"""`draftree tune`: which drafter, with which trie and trees, is fastest for this model, text and machine.

First the model answers some of the prompts plainly, which is recorded. Then some hundred settings are replayed on the
records, without the model (`draftree.tuning.replay`). The best of them run for real on other prompts, interleaved with
each other and with plain decoding; the slower half leaves, the rest goes on with twice the prompts, until the time is
used up.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.tuning.live import Judged, run_live
from draftree.tuning.prepare import Prepared, TuningOptions, prepare
from draftree.tuning.record import Record, Text
from draftree.tuning.space import PLAIN, Candidate, Predicted, Space, trained_of

RECORD, PROBE, REPLAY = 0.25, 0.375, 0.5  # shares of the time that are over when recording, probing and replaying end
FEWEST, PROBED = 4, 4  # rows of prompts that are recorded at least, and texts that are probed at most
FINALISTS = 7  # that run for real, besides plain decoding and what cannot be replayed
PER_FAMILY = 3  # of one drafter among them, with different trees
MOST_ROUNDS = 4  # in which the same prompts are answered, where there are few
MOST_LOST = 0.95  # of plain speed that drafting keeps, by the lower end of its interval, to be chosen


@dataclass(slots=True)
class Choice:
    """What tuning found."""

    best: Judged  # the fastest; plain decoding where nothing is faster
    judged: list[Judged]  # all that ran for real, fastest first, those that stayed longest before the others
    replays: int  # how many settings were replayed
    prompts: tuple[int, int, int]  # (recorded to search on, recorded to judge by, answered to teach tries)
    seconds: float  # that it took
    # space, texts: what makes the drafter, and all recorded texts but the lessons.
    space: Space
    texts: list[Text]


def tune(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: TuningOptions, watcher: Watcher | None = None
) -> Choice:
    """Find the fastest way of decoding `prompts` within `options.minutes`.

    Raises:
        ValueError: prompts or drafters that cannot be used, before any work; or a time that is too short for them,
            once the first answer has shown how long they take.
    """
    watcher = watcher or Watcher()
    begin = time.monotonic()
    whole = 60 * options.minutes
    prepared = prepare(model, tokenizer, prompts, options)
    record = Record(model, options.max_new_tokens, trained_of(options.specs, model, tokenizer))
    judge = fill(record, prepared, watcher, begin, whole)
    space = Space(record, options.specs, tokenizer)
    watcher.stage("replaying", None)
    found = space.search(lambda: time.monotonic() - begin > REPLAY * whole, watcher.step)
    judged = _halve(space, finalists(found), judge, begin + whole, watcher)
    counts, texts = (len(record.texts), len(judge), len(record.lessons)), [*record.texts, *judge]
    replays = sum(p.replayed is not None for p in found)
    return Choice(choose(judged), judged, replays, counts, time.monotonic() - begin, space, texts)


def fill(
    record: Record, prepared: Prepared, watcher: Watcher, begin: float = 0.0, whole: float = math.inf
) -> list[Text]:
    """Fill the record, a prompt to search on, one to judge by and one to teach with in turn; those to judge by.

    Steps of several rows are timed on one text, and on some more if there is time. Tuning began at `begin` and may take
    `whole` seconds, a part of which is for the record.

    Raises:
        ValueError: that time is too short, as the first prompts have shown.
    """
    rows = list(itertools.zip_longest(prepared.search, prepared.judge, prepared.lessons))
    count = len(rows)
    watcher.stage("recording", count)
    started = time.monotonic()
    judge: list[Text] = []
    for number, (searched, judged, lesson) in enumerate(rows):
        if searched is not None:
            record.text(searched)
        if judged is not None:
            record.text(judged)
            judge.append(record.texts.pop())
        if lesson is not None:
            record.lesson(lesson)
        if number == 0:
            row = time.monotonic() - started
            record.probe(record.texts[0])
            first = time.monotonic() - started
            least = started - begin + first + (min(count, FEWEST) - 1) * row
            if least > RECORD * whole:
                enough = math.ceil(12 * least / RECORD / 60) / 10  # a fifth more, for a slower second try
                raise ValueError(
                    f"{whole / 60:g} minutes are too few: the first prompts took {first:.1f} s, so give --minutes "
                    f"{enough:.1f} or more, or fewer --max-new-tokens."
                )
        watcher.step()
        if time.monotonic() - begin > RECORD * whole:
            break
    for text in record.texts[1:PROBED]:
        if time.monotonic() - begin + first - row > PROBE * whole:
            break
        record.probe(text)
    return judge


def finalists(found: Sequence[Predicted]) -> list[Candidate]:
    """The best by prediction, not all of one drafter, with trees that differ; and whatever cannot be replayed.

    Times are predicted less well than acceptance, so neighbouring sizes of one drafter tell little: sizes are taken
    that lie a factor of two apart.
    """
    chosen: list[Candidate] = []
    families: dict[str, list[int | None]] = {}
    for p in found:
        own = families.setdefault("" if p.candidate.spec is None else p.candidate.spec.label, [])
        size = p.candidate.node_budget
        if p.replayed is None or len(chosen) == FINALISTS or len(own) == PER_FAMILY:
            continue
        if all(_apart(size, other) for other in own):
            own.append(size)
            chosen.append(p.candidate)
    return chosen + [p.candidate for p in found if p.replayed is None]


def _apart(a: int | None, b: int | None) -> bool:
    if a is None or b is None:
        return a is not b
    return max(a, b) >= 2 * min(a, b)


def choose(judged: Sequence[Judged]) -> Judged:
    """The fastest of those that stayed longest, if it is faster than plain decoding and sure not to be much slower."""
    plain = next(one for one in judged if one.candidate.spec is None)
    last = [one for one in judged if one.candidate.spec is not None and one.stage == plain.stage]
    best = max(last, key=lambda one: one.over_plain, default=plain)
    low = best.row.over[PLAIN.name].low
    return best if best.over_plain > 1 and (low is None or low > MOST_LOST) else plain


def _halve(
    space: Space, candidates: Sequence[Candidate], texts: Sequence[Text], end: float, watcher: Watcher
) -> list[Judged]:
    """Run candidates for real until one is left or time is up; plain decoding always stays."""
    alive = list(candidates)
    left: list[Judged] = []
    count = 0
    for stage in itertools.count():
        rounds = max(len(alive).bit_length(), 1)
        share = max(end - time.monotonic(), 0.0) / rounds
        plain = space.predict(PLAIN, texts)
        assert plain is not None
        # As many prompts as all can answer in that time, each taken for as slow as plain decoding.
        runs = max(int(share / ((len(alive) + 1) * plain.seconds / len(texts))), 2 * count, 1)
        count = min(runs, len(texts))
        judged = run_live(space, alive, texts[:count], watcher, min(runs // count, MOST_ROUNDS), stage)
        over = time.monotonic() + share * 0.5 > end or len(alive) <= 2
        drafted = sorted((one for one in judged if one.candidate.spec is not None), key=lambda one: -one.over_plain)
        if over:
            break
        keep = drafted[: max((len(drafted) + 1) // 2, 1)]
        left = [one for one in drafted if one not in keep] + left
        alive = [one.candidate for one in keep]
    return sorted(judged, key=lambda one: -one.over_plain) + left
