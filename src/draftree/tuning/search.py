"""`draftree tune`: which drafter, with which trie and trees, is fastest for this model, text and machine.

First the model answers some of the prompts plainly, which is recorded. Then some hundred settings are replayed on the
records, without the model (`draftree.tuning.replay`). The best of them run for real on other prompts, interleaved with
each other and with plain decoding; the slower half leaves, the rest goes on with twice the prompts, until the time is
used up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftree.bench.measure import measure, ready
from draftree.bench.methods import Draftree
from draftree.bench.samples import Task
from draftree.bench.summary import Row, summarise
from draftree.engine.limits import check_prompt
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt, take_per_set
from draftree.runner import inspect_model
from draftree.shaping import Shape
from draftree.tuning.file import Spec, shape_of
from draftree.tuning.record import Record, Text
from draftree.tuning.replay import Replayed
from draftree.tuning.space import Candidate, Predicted, Space, trained_of

RECORD, REPLAY = 0.25, 0.5  # shares of the time that are over when recording ends, and replaying
FINALISTS = 7  # that run for real, besides plain decoding and what cannot be replayed
PER_FAMILY = 3  # of one drafter among them, with different trees
FEWEST = 4  # prompts to record
MOST_ROUNDS = 4  # in which the same prompts are answered, where there are few
MOST_LOST = 0.95  # of plain speed that drafting keeps, by the lower end of its interval, to be chosen
PLAIN = Candidate(None)


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """What to tune for.

    Attributes:
        minutes: for all of it.
        max_new_tokens: most tokens of an answer.
        per_set: most prompts of every set.
        specs: drafters besides tries and prompt lookup.
    """

    minutes: float = 5.0
    max_new_tokens: int = 96
    per_set: int = 40
    specs: tuple[Spec, ...] = ()

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes:g}: give a time over 0.")


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate that ran for real.

    Attributes:
        candidate: which.
        row: its figures in the last round it took part in.
        prompts: how many it answered there.
        predicted: what replay predicts for the same prompts, in the same order; None where it cannot be replayed.
        stage: how many times the slower half had left before.
    """

    candidate: Candidate
    row: Row
    prompts: int
    predicted: Replayed | None
    stage: int = 0

    @property
    def over_plain(self) -> float:
        """Speed over plain decoding."""
        return self.row.over[PLAIN.name].value

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        candidate, stats = self.candidate, self.row.stats
        entry: dict[str, Any] = {
            "label": candidate.label,
            "drafter": None if candidate.spec is None else candidate.spec.as_dict(),
            "node_budget": candidate.node_budget,
            "prompts": self.prompts,
            "tokens_per_second": self.row.speed.as_dict(),
            "over_plain": self.row.over[PLAIN.name].as_dict(),
            "acceptance_length": None if stats is None else stats.acceptance_length,
        }
        if self.predicted is not None:
            entry["predicted_acceptance_length"] = self.predicted.stats.acceptance_length
            entry["predicted_tokens_per_second"] = self.predicted.speed
        return entry


@dataclass(slots=True)
class Choice:
    """What tuning found.

    Attributes:
        best: the fastest; plain decoding where nothing is faster.
        judged: all that ran for real, fastest first, those that stayed longest before the others.
        replays: how many settings were replayed.
        prompts: (recorded to search on, recorded to judge by, answered to teach tries).
        seconds: that it took.
        space: makes the drafter.
        texts: all recorded texts but the lessons.
    """

    best: Judged
    judged: list[Judged]
    replays: int
    prompts: tuple[int, int, int]
    seconds: float
    space: Space
    texts: list[Text] = field(default_factory=list)

    def why(self) -> list[str]:
        """The choice in three lines."""
        best = self.best
        if best.candidate.spec is None:
            first = f"Plain decoding: none of {self.replays} settings is sure to be faster here."
        else:
            options = _options(best.candidate.spec)
            first = f"{best.candidate.label}{f' ({options})' if options else ''}: {_over(best)}."
        others = [one for one in self.judged if one is not best and one.candidate.spec is not None]
        second = "Nothing else was measured."
        if others:
            near = max(others, key=lambda one: (one.stage, one.over_plain))
            second = f"Next best: {near.candidate.label}, {_over(near)}; {self.replays} settings were replayed."
        return [first, second, self._third()]

    def _third(self) -> str:
        best = self.best if self.best.candidate.spec is not None else None
        if best is None or best.row.stats is None:
            tried = max((one.over_plain for one in self.judged if one.candidate.spec is not None), default=1.0)
            why = "too few draft tokens are accepted, or rows cost too much"
            return f"The fastest drafting ran at {tried:.2f} of plain speed: {why}."
        length = best.row.stats.acceptance_length
        text = f"A step brings {length:.2f} tokens"
        if best.predicted is not None:
            text += f" (replay predicted {best.predicted.stats.acceptance_length:.2f})"
        text += f" and takes {length / best.over_plain:.2f} plain ones"
        sets = {name: row.over[PLAIN.name].value for name, row in best.row.by_set.items()}
        if len(sets) > 1:
            high, low = max(sets, key=lambda name: sets[name]), min(sets, key=lambda name: sets[name])
            text += f"; most on {high} ({sets[high]:.2f}), least on {low} ({sets[low]:.2f})"
        return f"{text}."


def _over(one: Judged) -> str:
    estimate = one.row.over[PLAIN.name]
    interval = "" if estimate.low is None else f" [{estimate.low:.2f}, {estimate.high:.2f}]"
    prompts = "1 prompt, too few for an interval" if one.prompts == 1 else f"{one.prompts} prompts"
    return f"{estimate.value:.2f}{interval} of plain speed on {prompts}"


def _options(spec: Spec) -> str:
    parts = [spec, *spec.parts]
    return ", ".join(f"{name} {value}" for part in parts for name, value in part.options.items())


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prompts as token ids: to search on, to judge by, to teach tries with; the same ones where there are few."""

    search: list[Task]
    judge: list[Task]
    lessons: list[Task]


def prepare(model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: TuningOptions) -> Prepared:
    """Split and encode the prompts.

    Where rows are marked with `split`, those of `warm` teach; else every second one does. Of the others every second
    one is searched on, and the rest judges.

    Raises:
        ValueError: an encoder-decoder, or a prompt that cannot be answered.
    """
    target = inspect_model(model)
    if target.encoder_decoder:
        raise ValueError("draftree tune is for decoder-only models: this one has an encoder.")
    chosen = take_per_set([p for p in prompts if not p.warm], options.per_set)
    warm = take_per_set([p for p in prompts if p.warm], options.per_set)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in (*chosen, *warm)]
    for task in tasks:
        try:
            check_prompt(task.ids, options.max_new_tokens, target.vocab_size, target.max_positions)
        except ValueError as error:
            raise ValueError(f"Prompt {task.prompt.id!r}: {error}") from None
    tests, lessons = tasks[: len(chosen)], tasks[len(chosen) :]
    if not lessons:
        lessons, tests = _halves(tests)
    if not tests:
        raise ValueError("All prompts are marked 'warm': leave 'split' out of the rows to judge by.")
    if len(tests) < FEWEST:
        return Prepared(tests, tests, lessons)
    search, judge = _halves(tests)
    return Prepared(search, judge, lessons)


def _halves(tasks: list[Task]) -> tuple[list[Task], list[Task]]:
    """Every second prompt of each set."""
    place: dict[str, int] = {}
    halves: tuple[list[Task], list[Task]] = ([], [])
    for task in tasks:
        number = place[task.prompt.set] = place.get(task.prompt.set, -1) + 1
        halves[number % 2].append(task)
    if not halves[1]:  # one prompt of each set
        return tasks[::2], tasks[1::2]
    return halves


def tune(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: TuningOptions, watcher: Watcher | None = None
) -> Choice:
    """Find the fastest way of decoding within `options.minutes`.

    Args:
        model, tokenizer: a decoder-only model and its tokenizer.
        prompts: of the text to tune for.
        options: time, lengths, drafters.
        watcher: hears of progress.

    Raises:
        ValueError: prompts or drafters that cannot be used, before any work; or a time that is too short for them,
            once the first answer has shown how long they take.
    """
    watcher = watcher or Watcher()
    begin = time.monotonic()
    whole = 60 * options.minutes
    prepared = prepare(model, tokenizer, prompts, options)
    record = Record(model, options.max_new_tokens, trained_of(options.specs, model, tokenizer))
    judge = _record(record, prepared, begin, whole, watcher)
    space = Space(record, options.specs, tokenizer)
    watcher.stage("replaying", None)
    found = space.search(lambda: time.monotonic() - begin > REPLAY * whole, watcher.step)
    judged = _halve(space, finalists(found), judge, begin + whole, watcher)
    return Choice(
        choose(judged),
        judged,
        len(found),
        (len(record.texts), len(judge), len(record.lessons)),
        time.monotonic() - begin,
        space,
        [*record.texts, *judge],
    )


def _record(record: Record, prepared: Prepared, begin: float, whole: float, watcher: Watcher) -> list[Text]:
    """Fill the record, a prompt to search on, one to judge by and one to teach with in turn; those to judge by."""
    kinds = [prepared.search, prepared.judge, prepared.lessons]
    count = max(map(len, kinds))
    watcher.stage("recording", count)
    judge: list[Text] = []
    for number in range(count):
        if number < len(prepared.search):
            record.text(prepared.search[number])
        if prepared.judge is prepared.search:
            judge = record.texts
        elif number < len(prepared.judge):
            record.text(prepared.judge[number])
            judge.append(record.texts.pop())
        if number < len(prepared.lessons):
            record.lesson(prepared.lessons[number])
        watcher.step()
        spent = time.monotonic() - begin
        if number == 0 and spent * min(count, FEWEST) > RECORD * whole:
            least = spent * min(count, FEWEST) / RECORD / 60
            raise ValueError(
                f"{whole / 60:g} minutes are too few: the first prompts took {spent:.1f} s, so give --minutes "
                f"{least:.1g} or more, or fewer --max-new-tokens."
            )
        if spent > RECORD * whole:
            break
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
        runs = max(_affordable(space, alive, texts, share), 2 * count, 1)
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


def _affordable(space: Space, alive: Sequence[Candidate], texts: Sequence[Text], seconds: float) -> int:
    """Prompts that all candidates and plain decoding can answer in that time, each taken for as slow as plain."""
    plain = space.predict(PLAIN, texts)
    assert plain is not None
    return int(seconds / ((len(alive) + 1) * plain.seconds / len(texts)))


def run_live(
    space: Space,
    candidates: Sequence[Candidate],
    texts: Sequence[Text],
    watcher: Watcher,
    rounds: int = 1,
    stage: int = 0,
    shape: Callable[[Candidate], Shape] = lambda one: shape_of(one.node_budget),
) -> list[Judged]:
    """Answer `texts` with every candidate and plainly, interleaved; each starts from its first state.

    `shape` gives a candidate's shape, anew for every round.
    """
    tasks = [text.task for text in texts]
    new = space.new
    methods = [
        Draftree(
            one.name,
            space.model,
            new,
            lambda one=one: space.drafter(one),  # type: ignore[misc]
            lambda one=one: None if one.spec is None else shape(one),  # type: ignore[misc]
        )
        for one in (PLAIN, *candidates)
    ]
    ready(methods, tasks[:1])
    watcher.stage("running", len(methods) * len(tasks) * rounds)
    rows = summarise(measure(methods, tasks, rounds, watcher), tasks, (PLAIN.name,))
    return [
        Judged(one, rows[one.name], len(tasks), None if one.spec is None else space.predict(one, texts), stage)
        for one in (PLAIN, *candidates)
    ]
