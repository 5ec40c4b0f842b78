"""`draftree bench speed`: figures that follow from what the file holds, parts that are parts, plain errors."""

import copy
import json
from itertools import pairwise

import pytest
import torch
from few import few
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from typer.testing import CliRunner

from benchmarks.inflate.model import inflate
from benchmarks.inflate.sizes import Size
from draftree.bench.inputs import Settings, Subject
from draftree.bench.kit import Kit, LeftOutError, WarmTrie
from draftree.bench.names import LIMITED, NODES, PLAIN
from draftree.bench.speed import (
    BEST,
    BEST_OVER_PLAIN,
    EFFICIENCY,
    EFFICIENCY_BEHIND,
    OVER_HF,
    ROWS,
    SHARE,
    STEP_FLOOR,
    TOKEN_FLOOR,
)  # fmt: skip
from draftree.bench.steps import HF, LOOP, check_context, time_rows, weight_bytes
from draftree.cli import app
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import embedded_prompts
from draftree.runner import open_runner

TINY = ["bench", "speed", "--max-new-tokens", "10", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """What tells the machine's speed need not be large here."""
    monkeypatch.setattr("draftree.bench.steps.BUFFER", 2**23)


@pytest.fixture
def prompts_file(tmp_path):
    """Two prompts to measure on and some that warm a trie, of a set whose answers are alike."""
    path = tmp_path / "prompts.jsonl"
    rows = [p for p in embedded_prompts() if p.set == "wikisql"]
    chosen = [p for p in rows if not p.warm][:2] + [p for p in rows if p.warm][:4]
    told = [{"prompt": p.text, "set": p.set, "split": "warm" if p.warm else "test"} for p in chosen]
    path.write_text("\n".join(map(json.dumps, told)))
    return path


def table_of(result, words):
    """The rows of the table whose title begins with these words."""
    ((_, rows),) = [entry for entry in result["tables"].items() if entry[0].startswith(words)]
    return rows


@pytest.mark.parametrize("params", few([None, "20M"], [None]))
def test_the_command_writes_figures_that_follow_from_what_was_measured(params, prompts_file, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "here"
    arguments = [*TINY, "--per-set", "2", "--context", "16", "--prompts", str(prompts_file), "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, *(["--params", params] if params else [])])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    result = json.loads((out / "bench-speed.json").read_text())
    assert str(tmp_path) not in json.dumps(result), "no machine paths in a result file"
    assert result["about"]["model"] == ("embedded chat-4m inflated to 20M" if params else "embedded chat-4m")
    figures = {r["figure"]: r for r in result["rows"]}
    steps = {(r["name"], r["rows"]): r for r in table_of(result, "Milliseconds of a step")}
    answers = {r["name"]: r for r in table_of(result, "embedded chat-4m")}
    assert set(steps) == {(method, n) for method in (HF, LOOP) for n in ROWS}
    for end in ("", "_low", "_high"):
        assert figures[OVER_HF][f"value{end}"] == answers[PLAIN][f"over HF generate{end}"]
    one = steps[LOOP, 1]["ms"]
    assert figures[STEP_FLOOR]["value"] == pytest.approx(1000 * result["more"]["floor"]["seconds"] / one)
    for n in ROWS[1:]:
        assert figures[f"{n}-row step / 1-row step"]["value"] == pytest.approx(steps[LOOP, n]["ms"] / one)
    assert figures[EFFICIENCY]["value"] == pytest.approx(answers[LIMITED]["overhead efficiency"])
    assert 0 < figures[SHARE]["value"] < 1
    # A token of plain decoding takes at least a share of a second that the answers' own speed allows.
    assert figures[TOKEN_FLOOR]["value"] > 0
    drafted = [m for m in ("draft-model", "lookahead-warm", "lookahead-warm+draft-model", LIMITED) if m in answers]
    assert figures[BEST]["value"] == pytest.approx(max(answers[m]["over HF generate"] for m in drafted))
    best = max(drafted, key=lambda name: answers[name]["over HF generate"])
    for end in ("", "_low", "_high"):
        assert figures[BEST_OVER_PLAIN][f"value{end}"] == answers[best][f"over plain{end}"], "drafting's own gain"
    assert not any("target" in row for row in result["rows"]), "what the project aims at is nobody else's goal"
    for row in answers.values():
        assert row["differing_prompts"] == [], "greedy fp32 answers equal Hugging Face's"
    for row in result["rows"]:
        assert {"commit", "device", "dtype", "threads", "command"} <= set(row)
    assert (out / "bench-speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_of_the_users_is_measured(demo, prompts_file, tmp_path):
    demo.model.save_pretrained(tmp_path / "model")
    demo.tokenizer.save_pretrained(tmp_path / "model")
    arguments = [*TINY, "--model", str(tmp_path / "model"), "--prompts", str(prompts_file), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "bench-speed.json").read_text())
    assert result["about"]["model"] == "model"
    assert OVER_HF in {row["figure"] for row in result["rows"]}


def test_answers_of_one_token_have_no_figures_of_decoding(demo, prompts_file, tmp_path):
    model = copy.deepcopy(demo.model)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # its best token is 0
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "model")
    demo.tokenizer.save_pretrained(tmp_path / "model")
    arguments = [*TINY, "--model", str(tmp_path / "model"), "--prompts", str(prompts_file), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "Every answer is a single token" in " ".join(done.output.split())
    figures = {row["figure"] for row in json.loads((tmp_path / "bench-speed.json").read_text())["rows"]}
    assert STEP_FLOOR in figures
    assert not figures & {TOKEN_FLOOR, EFFICIENCY_BEHIND, SHARE}


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


def test_a_model_for_images_has_the_vocabulary_and_positions_of_its_text():
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95)
    model = Gemma3ForConditionalGeneration(config).eval()
    steps = time_rows(model, {LOOP: (open_runner(model), (1, 2))}, 8, 1, Watcher())
    assert [row["rows"] for row in steps.rows if row["name"] == LOOP] == [1, 2]
    with pytest.raises(ValueError, match="do not fit the model's 64 positions"):
        check_context(60, 8, model)


def test_weight_bytes_are_those_of_all_but_the_embedding(demo):
    large = inflate(demo.model, "20M")
    size = Size.of(large.config)
    names = {name: p.numel() for name, p in large.named_parameters() if p is not large.get_input_embeddings().weight}
    vectors = sum(p.numel() for p in large.parameters() if p.dim() == 1)
    held = 2 * (sum(names.values()) + vectors)  # numbers that 16 bits hold, and norms
    scaled = sum(names[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(large.config.num_hidden_layers))
    read = weight_bytes(large)
    assert held < read <= held + 2 * scaled, "some queries were scaled"
    with torch.no_grad():
        large.lm_head.weight.mul_(1.0001)
    assert weight_bytes(large) == read + 2 * large.lm_head.weight.numel()
    vectors = sum(p.numel() for p in demo.model.parameters() if p.dim() == 1)
    held = sum(p.numel() for p in demo.model.parameters())
    assert weight_bytes(demo.model) == 2 * (held + vectors), "its tied head is read"
    assert size.vocab_size == demo.model.config.vocab_size


@pytest.fixture
def warm(demo):
    prompts = [p for p in embedded_prompts() if p.set == "wikisql" and p.warm][:6]
    lessons = [encode_prompt(demo.tokenizer, prompt.text) for prompt in prompts]
    return WarmTrie.learn(demo.model, lessons, 24, Watcher())


def drafted_by_step(method, ids):
    drafted = [0]
    method.answer(ids, lambda request: drafted.append(request.stats.drafted))
    return [after - before for before, after in pairwise(drafted)]


def test_the_limited_trie_never_offers_more(demo, warm):
    method = Kit(Subject(*demo), Settings(max_new_tokens=24), warm).method(LIMITED)
    prompts = [p for p in embedded_prompts() if p.set == "wikisql" and not p.warm][:4]
    steps = [drafted for p in prompts for drafted in drafted_by_step(method, encode_prompt(demo.tokenizer, p.text))]
    assert 0 < max(steps) < NODES
    with pytest.raises(LeftOutError, match="no prompts"):
        Kit(Subject(*demo), Settings(max_new_tokens=24)).method(LIMITED)
