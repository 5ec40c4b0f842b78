"""`draftree tune`: halving finds the fastest candidate; the choice is written and loaded by one argument; bad input."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

import draftree
from draftree.cli import app
from draftree.drafting.folder import demo_drafter
from draftree.engine import RequestStats
from draftree.models import encode_prompt
from draftree.prompts import Prompt, Watcher
from draftree.shaping import Fixed, shape_for
from draftree.tuned import load_tuned, write_tuned
from draftree.tuning.tune import PLAIN, Candidate, Runner, halve, list_candidates, tune

PROMPTS = [[number] for number in range(60)]


class Clock:
    """A clock that only fake decoding advances."""

    now = 0.0

    def __call__(self):
        return self.now


def fakes(clock, seconds):
    """Return runners whose answers take `seconds` by candidate, and the log of (prompt, candidate)."""
    log = []

    def runner(candidate, taken):
        def answer(ids):
            log.append((ids[0], candidate))
            clock.now += taken(ids[0]) if callable(taken) else taken
            return RequestStats(steps=5, accepted=5, emitted=10)

        return Runner(candidate, answer)

    return [runner(candidate, taken) for candidate, taken in seconds.items()], log


def sizes(count):
    return [Candidate(("lookahead",), size) for size in range(1, count + 1)]


# -------------------------------------------------------------------- the search


def test_the_fastest_candidate_remains_and_each_decodes_a_prompt_once():
    clock = Clock()
    seconds = {PLAIN: 2.0} | {one: 1.0 + abs(3 - one.node_budget) / 4 for one in sizes(8)}
    runners, log = fakes(clock, seconds)
    results = halve(runners, PROMPTS, Watcher(), clock=clock)
    assert results[0].candidate.node_budget == 3
    assert (results[0].ratio, results[0].tokens_per_second) == pytest.approx((2.0, 10.0))
    assert results[0].acceptance_length == 2.0
    assert len(log) == len(set(log))
    by_candidate = {one.candidate: one.prompts for one in results}
    assert by_candidate[PLAIN] == max(by_candidate.values()) > by_candidate[sizes(8)[-1]]
    assert len(results) == 9
    order = [(-one.rounds, -one.tokens_per_second) for one in results]
    assert order == sorted(order), "later rounds first, and the fast before the slow"
    assert results[-1].rounds == 1 < results[0].rounds


def test_candidates_take_turns_in_being_first():
    clock = Clock()
    runners, log = fakes(clock, {PLAIN: 1.0} | dict.fromkeys(sizes(3), 1.0))
    halve(runners, PROMPTS[:4], Watcher(), clock=clock)
    first = [next(one for prompt, one in log if prompt == number) for number in range(3)]
    assert len(set(first)) == 3


def test_plain_decoding_wins_if_every_drafter_is_slower():
    clock = Clock()
    runners, _ = fakes(clock, {PLAIN: 1.0} | dict.fromkeys(sizes(4), 1.5))
    results = halve(runners, PROMPTS, Watcher(), clock=clock)
    assert results[0].candidate == PLAIN
    assert results[1].ratio == pytest.approx(2 / 3)


def test_the_search_ends_where_only_noise_is_left():
    clock = Clock()
    noisy = [lambda n: 1.0 + 0.1 * (n % 2), lambda n: 1.1 - 0.1 * (n % 2), lambda n: 1.05 + 0.02 * (n % 3)]
    runners, log = fakes(clock, {PLAIN: lambda n: 1.0 + 0.1 * (n % 4 > 1)} | dict(zip(sizes(3), noisy, strict=True)))
    halve(runners, PROMPTS, Watcher(), clock=clock)
    assert 8 <= len({number for number, _ in log}) < len(PROMPTS)


def test_time_ends_the_search_after_the_present_prompt():
    clock = Clock()
    runners, log = fakes(clock, {PLAIN: 1.0} | dict.fromkeys(sizes(3), 1.0))
    results = halve(runners, PROMPTS, Watcher(), end=5.0, clock=clock)
    assert {one.prompts for one in results} == {2}
    assert len(log) == 8


def test_candidates_are_free_drafters_given_ones_and_merges():
    found = {one.drafters for one in list_candidates(["medusa", "./mine"])}
    merges = {("lookahead", "medusa"), ("lookahead", "./mine")}
    assert found == {(), ("lookahead",), ("prompt-lookup",), ("medusa",), ("./mine",)} | merges
    assert list_candidates([])[0] == PLAIN


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (["Hello."], {}, "takes two prompts or more"),
        (["Hello.", "Hi."], {"minutes": 0}, "minutes is 0: give a finite number over 0"),
        (["Hello.", "Hi."], {"minutes": math.inf}, "minutes is inf"),
        (["Hello.", "Hi."], {"max_new_tokens": 5000}, "Prompt '0': .*context"),
        (["Hello.", "Hi."], {"drafters": ["jacobi-folder"]}, "no drafter folder 'jacobi-folder'"),
    ],
)
def test_bad_input_is_one_sentence(demo, prompts, options, words):
    asked = [Prompt(str(number), "s", text) for number, text in enumerate(prompts)]
    with pytest.raises(ValueError, match=words):
        tune(demo.model, demo.tokenizer, asked, **options)


# -------------------------------------------------------------------- the command and the file


def test_the_command_measures_and_writes_a_choice(demo, tmp_path):
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "made" / "here.json"
    asked.write_text("".join(json.dumps({"ask": f"List {number} files."}) + "\n" for number in range(3)))
    command = ["tune", "--prompts", str(asked), "--column", "ask", "--drafters", "medusa", "--max-new-tokens", "6"]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "acceptance" in done.output
    assert "times" in done.output
    assert "is chosen" in done.output
    written = json.loads(out.read_text())
    assert len(written["results"]) == len(list_candidates(["medusa"]))
    assert {"candidate": "plain", "ratio": 1.0, "acceptance_length": 1.0}.items() <= next(
        one for one in written["results"] if one["candidate"] == "plain"
    ).items()
    load_tuned(out, demo.model, demo.tokenizer)


def test_a_choice_is_loaded_by_one_argument(demo, tmp_path):
    path = tmp_path / "choice.json"
    write_tuned(path, demo.model, ("lookahead", "medusa"), 3, [])
    drafter = draftree.load_tuned(path, demo.model, demo.tokenizer)
    assert drafter.node_budget == 3
    assert isinstance(shape_for(drafter), Fixed)
    prompt = torch.tensor([encode_prompt(demo.tokenizer, "List all files.")])
    plain = draftree.generate(demo.model, prompt, max_new_tokens=12)
    out = draftree.generate(demo.model, prompt, drafter=drafter, max_new_tokens=12)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.total.accepted > 0
    done = CliRunner().invoke(app, ["generate", "--drafter", str(path), "--max-new-tokens", "8", "--json", "Hello"])
    assert done.exit_code == 0, done.output


def test_folders_are_relative_to_the_file(demo, tmp_path, monkeypatch):
    """A folder named like a drafter of the embedded model is still read as a folder."""
    folder = tmp_path / "drafters" / "medusa"
    demo_drafter("hidden-transfer", demo.model).save_pretrained(folder)
    path = tmp_path / "choices" / "choice.json"
    path.parent.mkdir()
    write_tuned(path, demo.model, (str(folder),), 4, [])
    assert str(tmp_path) not in path.read_text()
    monkeypatch.chdir("/")
    assert load_tuned(path, demo.model).method == "hidden-transfer"
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="which is missing: put it back"):
        load_tuned(path, demo.model)


def test_plain_decoding_is_a_choice(demo, tmp_path):
    path = tmp_path / "choice.json"
    write_tuned(path, demo.model, (), None, [])
    assert load_tuned(path, demo.model) is None


def test_a_file_that_does_not_fit_is_refused_in_one_sentence(demo, tmp_path):
    path = tmp_path / "choice.json"
    write_tuned(path, demo.model, (), None, [])
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"machine": written["machine"] | {"threads": 77}}))
    with pytest.warns(UserWarning, match="tuned with threads 77"):
        load_tuned(path, demo.model)
    path.write_text(json.dumps(written | {"model": "0" * 64}))
    with pytest.raises(ValueError, match="tuned for another model"):
        load_tuned(path, demo.model)
    for text in ("{}", "[]", "{", json.dumps(written | {"drafters": None})):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a file of draftree tune"):
            load_tuned(path, demo.model)
    with pytest.raises(ValueError, match="no tuned choice"):
        load_tuned(tmp_path / "nowhere.json", demo.model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "nowhere.jsonl"], "There is no prompts file 'nowhere.jsonl'"),
        (["--drafters", "medusas"], "Did you mean 'medusa'?"),
        (["--drafters", "lookahead"], "is always measured"),
        (["--drafters", "grammar"], "is not measured"),
        (["--out", "choice.toml"], "name a .json file"),
        (["--model", "./no-such-folder"], "no model folder './no-such-folder'"),
    ],
)
def test_wrong_options_are_one_sentence(arguments, words, refused):
    refused(["tune", *arguments], words)


def test_default_drafters_are_for_the_embedded_model_in_float32(monkeypatch):
    asked = []
    monkeypatch.setattr("draftree.tuning.tune.tune", lambda *given, **_: asked.append(given[3]) or given[9])
    for dtype in ("float32", "bfloat16"):
        CliRunner().invoke(app, ["tune", "--dtype", dtype])
    assert [len(names) for names in asked] == [2, 0]
