"""`draftree tune` with little time or few prompts: every drafter is measured, and no prompt is used twice."""

import pytest
from typer.testing import CliRunner

from draftree.cli import app
from draftree.progress import Watcher
from draftree.prompts import Prompt, embedded_prompts
from draftree.tuning.file import Spec
from draftree.tuning.prepare import TuningOptions, prepare
from draftree.tuning.search import fill, tune
from draftree.tuning.space import LOOKUPS


class Clock:
    """In place of `time`: time goes on by `step` seconds with every look at it, and where it is moved."""

    def __init__(self, step=0.0):
        self.now, self.step = 0.0, step

    def monotonic(self):
        self.now += self.step
        return self.now


def test_a_time_that_is_over_early_still_runs_every_drafter_and_counts_what_was_replayed(demo, monkeypatch):
    monkeypatch.setattr("draftree.tuning.search.time", Clock(2))
    monkeypatch.setattr("draftree.tuning.search.MOST_ROUNDS", 1)
    chosen = [p for p in embedded_prompts() if p.set == "wikisql"]
    choice = tune(
        demo.model, demo.tokenizer, chosen, TuningOptions(1, 4, 4, (Spec("draft-model", name="draft-model"),))
    )
    drafters = {one.candidate.spec.label for one in choice.judged if one.candidate.spec is not None}
    assert {"Lookahead, cold", "Lookahead, warm", "PromptLookup", "DraftModel"} <= drafters
    assert choice.replays == 2 + len(LOOKUPS), "DraftModel and what it is merged with cannot be replayed"


def test_turns_that_are_not_answered_are_told(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turns": ["Hello.", "And then?"]}\n')
    done = CliRunner().invoke(app, ["tune", "--prompts", str(path), "--out", str(tmp_path / "x.json")])
    assert "Of rows with several turns the first is answered." in done.output
    assert "Tuning takes 3 prompts or more" in str(done.exception)


class Slow:
    """A record for `fill` whose prompts take `each` seconds, and whose probes ten times as long."""

    def __init__(self, clock, each):
        self.clock, self.each, self.texts, self.probed = clock, each, [], 0

    def text(self, task):
        self.clock.now += self.each
        self.texts.append(task)

    def lesson(self, _):
        self.clock.now += self.each

    def probe(self, _):
        self.clock.now += 10 * self.each
        self.probed += 1


@pytest.fixture
def divided(demo):
    prompts = [Prompt(str(i), "s", f"Write a list of {i} numbers.") for i in range(20)]
    return prepare(demo.model, demo.tokenizer, prompts, TuningOptions(1, 8))


@pytest.mark.parametrize(("each", "probed"), [(1.1, 1), (0.7, 3), (0.01, 4)])
def test_steps_of_several_rows_are_timed_as_far_as_there_is_time(divided, monkeypatch, each, probed):
    """Slow models used up all time there, and no setting was replayed."""
    clock = Clock()
    monkeypatch.setattr("draftree.tuning.search.time", clock)
    record = Slow(clock, each)
    fill(record, divided, Watcher(), 0.0, 100.0)
    assert record.probed == probed
    assert len(record.texts) >= 4
    assert clock.now < 50, "half of the time is left, and some to replay in"


@pytest.mark.parametrize(
    ("each", "asked"), [(0.01, "0.1"), (3.0, "5.3"), (12.0, "21.2"), (15.5, "27.3"), (900, "1584.0")]
)
def test_the_minutes_that_are_asked_for_are_enough_also_where_the_second_try_is_slower(
    divided, monkeypatch, each, asked
):
    clock = Clock()
    monkeypatch.setattr("draftree.tuning.search.time", clock)
    with pytest.raises(ValueError, match=f"give --minutes {asked} or more"):
        fill(Slow(clock, each), divided, Watcher(), clock.now, 0.1)
    begin = clock.now
    fill(Slow(clock, 1.15 * each), divided, Watcher(), begin, 60 * float(asked))


@pytest.mark.parametrize("sets", ["aaa", "abc", "aab", "abb", "aabc", "abbcccc"])
def test_prompts_are_used_once_however_few_there_are(demo, sets):
    prompts = [Prompt(str(i), name, f"Count to {i}.") for i, name in enumerate(sets)]
    prepared = prepare(demo.model, demo.tokenizer, prompts, TuningOptions())
    parts = [[task.prompt.id for task in part] for part in (prepared.search, prepared.judge, prepared.lessons)]
    assert sorted(number for part in parts for number in part) == [prompt.id for prompt in prompts]
    assert all(parts)


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        (["", ""], "Tuning takes 3 prompts or more, as none is used twice, instead of 2: give more rows"),
        ([""], "instead of 1"),
        (["warm", "warm", ""], "Tuning takes 2 prompts or more that are not marked 'warm', as none .* instead of 1"),
        (["warm"] * 4, "not marked 'warm', as none is used twice, instead of 0"),
    ],
)
def test_too_few_prompts_are_told(demo, splits, said):
    prompts = [Prompt(str(i), "s", f"Count to {i}.", split == "warm") for i, split in enumerate(splits)]
    with pytest.raises(ValueError, match=said):
        prepare(demo.model, demo.tokenizer, prompts, TuningOptions())
