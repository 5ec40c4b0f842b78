"""`draftree bench speed`: figures that follow from what the file holds, parts that are parts, plain errors."""

import json
import math
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from draftree.bench import inflate_measure, speed, speed_stages
from draftree.bench.compare_methods import PLAIN, REFERENCE, Kit, LeftOutError, WarmTrie
from draftree.bench.harness import Task, Watcher
from draftree.bench.inflate import inflate
from draftree.bench.inflate_measure import HF, LOOP
from draftree.bench.models import encode_prompt
from draftree.bench.prompts import embedded_prompts
from draftree.bench.sizes import Size
from draftree.bench.speed import ROWS, spread
from draftree.bench.speed_figures import (
    BEST,
    EFFICIENCY,
    LIMITED,
    NODES,
    OVER_HF,
    SHARE,
    STEP_FLOOR,
    TOKEN_FLOOR,
    WANTED,
    Figure,
    SpeedKit,
)  # fmt: skip
from draftree.bench.speed_stages import PASS_PARTS, STEP_PARTS, engine_stages, pass_parts
from draftree.bench.speed_steps import weight_bytes
from draftree.bench.summary import Estimate
from draftree.cli import app
from draftree.native import load_library
from draftree.runner import open_runner
from draftree.shaping import DynamicTree

TINY = ["bench", "speed", "--params", "20M", "--answers", "1", "--max-new-tokens", "10", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """What tells the machine's speed need not be large here."""
    monkeypatch.setattr(inflate_measure, "BUFFER", 2**23)
    monkeypatch.setattr(speed_stages, "SIDE", 256)
    monkeypatch.setattr(speed_stages, "TALL", 16)
    monkeypatch.setattr(speed, "PARTS_ROUNDS", {"embedded": 2, "inflated": 1})


@pytest.fixture
def prompts_file(tmp_path):
    """Two prompts to measure on and some that warm a trie, of a set whose answers are alike."""
    path = tmp_path / "prompts.jsonl"
    rows = [p for p in embedded_prompts() if p.set == "wikisql"]
    chosen = [p for p in rows if not p.warm][:2] + [p for p in rows if p.warm][:4]
    told = [{"prompt": p.text, "set": p.set, "split": "warm" if p.warm else "test"} for p in chosen]
    path.write_text("\n".join(map(json.dumps, told)))
    return path


def test_the_command_writes_figures_that_follow_from_what_was_measured(prompts_file, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "here"
    arguments = [*TINY, "--per-set", "2", "--context", "16", "--prompts", str(prompts_file), "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    result = json.loads((out / "bench-speed.json").read_text())
    assert str(tmp_path) not in json.dumps(result), "no machine paths in a result file"
    assert set(result["models"]) == {"embedded", "20M"}
    for label, kind in (("embedded", "embedded"), ("20M", "inflated")):
        figures = {r["name"]: r for r in result["rows"] if r["kind"] == "figure" and r["model"] == label}
        steps = {(r["method"], r["rows"]): r for r in result["rows"] if r["kind"] == "step" and r["model"] == label}
        told = result["models"][label]
        answers = {r["method"]: r for r in told["answers"]["rows"]}
        assert set(steps) == {(method, n) for method in (HF, LOOP) for n in ROWS}
        assert figures[OVER_HF]["estimate"] == answers[PLAIN]["speed_over"][REFERENCE]
        one = steps[LOOP, 1]["seconds"]
        assert figures[STEP_FLOOR]["estimate"]["value"] == pytest.approx(told["floor"]["seconds"] / one)
        for n in ROWS[1:]:
            over = steps[LOOP, n]["seconds"] / one
            assert figures[f"{n}-row step / 1-row step"]["estimate"]["value"] == pytest.approx(over)
        limited = answers[LIMITED]
        assert figures[EFFICIENCY]["estimate"]["value"] == pytest.approx(limited["overhead_efficiency"])
        assert 0 < figures[SHARE]["estimate"]["value"] < 1
        # A token of plain decoding takes at least a share of a second that the answers' own speed allows.
        assert figures[TOKEN_FLOOR]["estimate"]["value"] > 0
        drafted = [m for m in ("draft_model", "lookahead_warm", "lookahead_warm+draft_model", LIMITED) if m in answers]
        best = max(answers[m]["speed_over"][REFERENCE]["value"] for m in drafted)
        assert figures[BEST]["estimate"]["value"] == pytest.approx(best)
        assert {name: (f["sense"], f["wanted"]) for name, f in figures.items() if f["wanted"] is not None} == {
            name: wish for name, wish in WANTED[kind].items() if "compile" not in name
        }
        for row in answers.values():
            assert row["differing_prompts"] == [], "greedy fp32 answers equal Hugging Face's"
        for row in result["rows"]:
            assert {"commit", "device", "dtype", "threads", "command"} <= set(row)
    stages = [row for row in result["rows"] if row["kind"] == "stages"]
    assert {row["model"] for row in stages} == {"embedded", "20M"}
    for row in stages:
        assert set(row["seconds"]) == {*STEP_PARTS, "whole"}
        assert 0 < row["seconds"]["commit"] < row["seconds"]["whole"]
    assert (out / "bench-speed.png").read_bytes().startswith(b"\x89PNG")


def test_without_an_inflated_model_and_stages_there_is_less(prompts_file, tmp_path):
    arguments = [*TINY, "--no-inflated", "--no-stages", "--prompts", str(prompts_file), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "bench-speed.json").read_text())
    assert set(result["models"]) == {"embedded"}
    assert {row["kind"] for row in result["rows"]} == {"figure", "step"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "plenty"], "no number of parameters"),
        (["--params", "3M"], "too few"),
        (["--context", "2040"], "do not fit the model's 2048 positions"),
        (["--prompts", "./missing.jsonl"], "There is no prompts file"),
    ],
)
def test_refused_in_one_sentence(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["bench", "speed", *arguments, "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert not list(tmp_path.glob("bench-*"))


def test_what_is_reached_goes_by_the_sense():
    value = Estimate(2.0, None, None)
    assert Figure("m", "f", value, ">=", 1.5).reached is True
    assert Figure("m", "f", value, "<=", 1.5).reached is False
    assert Figure("m", "f", value).reached is None
    assert Figure("m", "f", value, ">=", 4.0).part_of_wanted == 0.5
    assert Figure("m", "f", value, "<=", 1.0).part_of_wanted == 0.5


def test_weight_bytes_are_those_of_all_but_the_embedding(demo):
    large = inflate(demo.model, "20M")
    size = Size.of(large.config)
    held = sum(p.numel() for p in large.parameters()) - large.get_input_embeddings().weight.numel()
    assert weight_bytes(large) == 4 * held
    assert weight_bytes(demo.model) == 4 * sum(p.numel() for p in demo.model.parameters()), "its tied head is read"
    assert size.vocab_size == demo.model.config.vocab_size


@pytest.fixture
def warm(demo):
    trie = WarmTrie(demo.model, demo.tokenizer, 24)
    for prompt in [p for p in embedded_prompts() if p.set == "wikisql" and p.warm][:6]:
        trie.learn(encode_prompt(demo.tokenizer, prompt.text))
    trie.keep()
    return trie


def test_the_limited_trie_never_offers_more_and_knows_what_was_learned(demo, warm):
    method = SpeedKit(demo.model, 24, warm=warm).method(LIMITED)
    shape = method.drafter.shape
    assert isinstance(shape, DynamicTree)
    assert shape.max_nodes == NODES - 1
    taught = warm.drafter().shape
    assert (shape.calibration.rates == taught.calibration.rates).all()
    assert shape.governor is not taught.governor
    prompt = next(p for p in embedded_prompts() if p.set == "wikisql" and not p.warm)
    drafted = [0]
    method.answer(encode_prompt(demo.tokenizer, prompt.text), lambda request: drafted.append(request.stats.drafted))
    steps = [after - before for before, after in pairwise(drafted)]
    assert 0 < max(steps) < NODES
    with pytest.raises(LeftOutError, match="no prompts"):
        SpeedKit(demo.model, 24).method(LIMITED)
    assert type(SpeedKit(demo.model, 24).method(PLAIN)) is type(Kit(demo.model, 24).method(PLAIN))


def test_stages_are_of_steps_with_exactly_so_many_rows(demo, warm):
    prompt = next(p for p in embedded_prompts() if p.set == "wikisql" and not p.warm)
    task = Task(prompt, encode_prompt(demo.tokenizer, prompt.text))
    found = engine_stages(demo.model, warm, [task], 24, Watcher())
    by_rows = {row["rows"]: row for row in found}
    assert {1, 8} <= set(by_rows) <= {1, 8, 16}
    assert by_rows[1]["shape"] == 0
    assert by_rows[1]["steps"] >= 5
    for row in found:
        assert all(row[part] >= 0 for part in STEP_PARTS)
        assert row["verify"] < row["whole"]
        assert row["whole"] == pytest.approx(sum(row[part] for part in STEP_PARTS))
    assert 0 < by_rows[8]["shape"] < by_rows[8]["whole"]


@pytest.mark.skipif(load_library() is None, reason="the compiled layers were not built")
def test_parts_of_a_pass_add_up_to_the_whole(demo):
    found = pass_parts(open_runner(demo.model, "cpu"), 8, 9, Watcher())
    assert found["bandwidth"] > 1e9
    assert found["peak"] > 1e9
    products = sum(p.numel() for name, p in demo.model.named_parameters() if "proj" in name)
    for row in found["passes"]:
        assert math.isclose(sum(row[part] for part in PASS_PARTS), row["whole"], rel_tol=1e-6)
        assert row["linear"] > 0
        assert row["head"] > 0
        least = max(4 * products / found["bandwidth"], 2 * products * row["rows"] / found["peak"])
        assert row["floors"]["linear"] == pytest.approx(least)


def test_parts_are_told_of_compiled_layers_alone(demo):
    assert pass_parts(open_runner(demo.model, "hooked"), 16, 1, Watcher()) is None


def test_a_few_of_many_are_spread():
    assert spread(list("abcdefghij"), 3) == ["a", "d", "g"]
    assert spread(list("ab"), 5) == ["a", "b"]
