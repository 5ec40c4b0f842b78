"""Alignment: a small model learns the large one's answers, continues after a kill, and stays a stock model."""

import json
import math
from dataclasses import replace

import pytest
import torch
from few import few
from training_driver import data_for
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, T5Config
from typer.testing import CliRunner
from zoo import MEMBERS, construct

import draftree
from draftree.cli import app
from draftree.demo_model import embedded
from draftree.drafting.folder import base_of
from draftree.training.align import AlignObjective, align, align_on_inputs, check_trainable
from draftree.training.answers import JOURNAL, AnswerOptions
from draftree.training.options import Inputs, TrainOptions
from draftree.training.rows import Row, collate
from draftree.training.trainer import DrafterTrainer

OPTIONS = TrainOptions(steps=24, batch=8, evaluations=3, checkpoints=4, dev_rows=100, learning_rate=1e-2)
LIKE = {"vocab_size": 97, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def small_model(kind, seed=3):
    """Return a model of one layer with tied embeddings and the large model's vocabulary."""
    start = construct(MEMBERS[kind]).config  # It draws weights from a seed of its own.
    torch.manual_seed(seed)
    if kind == "t5":
        config = T5Config(
            vocab_size=start.vocab_size, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            decoder_start_token_id=start.decoder_start_token_id, eos_token_id=start.eos_token_id,
            pad_token_id=start.pad_token_id,
        )  # fmt: skip
        return AutoModelForSeq2SeqLM.from_config(config).eval()
    return AutoModelForCausalLM.from_config(LlamaConfig(**LIKE, tie_word_embeddings=True)).eval()


@pytest.fixture(scope="module", params=["llama", "t5"])
def case(request, tmp_path_factory):
    """Return a large model and its answers, decoder-only and encoder-decoder."""
    large = construct(MEMBERS[request.param])
    return request.param, large, data_for(large, tmp_path_factory.mktemp("align") / "data")


def run(case, out, **changes):
    kind, large, data = case
    more = {name: changes.pop(name) for name in ("optimizer",) if name in changes}
    small = changes.pop("small", None) or small_model(kind)
    return align(large, small, data, out, options=replace(OPTIONS, **changes), report=lambda line: None, **more)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("optimizer", few(["adafactor", "adamw"], ["adafactor"]))
def test_a_small_model_learns_to_agree_with_the_large_one(case, tmp_path, optimizer):
    kind, large, _ = case
    before = [p.clone() for p in large.parameters()]
    recipe = run(case, tmp_path, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, large.parameters(), strict=True))
    assert all(p.grad is None for p in large.parameters())
    assert recipe["loss"]["after"] < recipe["loss"]["before"] - 0.1
    assert recipe["agreement"]["after"] >= recipe["agreement"]["before"], "random answers: there is little to learn"
    assert recipe == json.loads((tmp_path / "recipe.json").read_text())
    assert (recipe["steps"], recipe["optimizer"]) == (24, optimizer)
    assert recipe["base_model"]["hash"] == base_of(large).hash
    rates = json.loads((tmp_path / "checkpoints" / "checkpoint-24" / "trainer_state.json").read_text())["log_history"]
    assert {entry["learning_rate"] for entry in rates if "learning_rate" in entry} == {1e-2}, "it is constant"
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    small = auto.from_pretrained(tmp_path)
    assert sum(p.numel() for p in small.parameters()) == recipe["parameters"]
    prompt = torch.tensor([[5, 6, 7, 8]])
    plain = draftree.generate(large, prompt, max_new_tokens=12)
    drafted = draftree.generate(large, prompt, drafter=draftree.DraftModel(small), max_new_tokens=12)
    assert torch.equal(plain.sequences, drafted.sequences)


def test_loss_and_agreement_equal_those_of_slow_counting(case):
    kind, large, _ = case
    small = small_model(kind)
    objective = AlignObjective(small).eval()
    source = ((9, 8, 7, 6), (5, 4)) if kind == "t5" else ((), ())
    start = [large.config.decoder_start_token_id] if kind == "t5" else [11, 12]
    rows = [Row((*start, 20, 21, 22, 0), len(start), source[0]), Row((*start, 30, 0), len(start), source[1])]
    with torch.no_grad():
        out = objective(**collate([(row, None) for row in rows], None))
        losses, hits = [], 0
        for row in rows:
            ids = torch.tensor([row.tokens])
            given = {"input_ids": torch.tensor([row.source]), "decoder_input_ids": ids} if kind == "t5" else {}
            logits = small(**(given or {"input_ids": ids})).logits[0].log_softmax(-1)
            for place in range(row.start, len(row)):
                losses.append(-float(logits[place - 1, row.tokens[place]]))
                hits += int(logits[place - 1].argmax()) == row.tokens[place]
    assert math.isclose(float(out["loss"]), sum(losses) / len(losses), rel_tol=1e-4)
    assert int(out["seen"][0]) == len(losses) == 6
    assert int(out["hits"][0, 0]) == hits


def test_a_resumed_run_equals_an_uninterrupted_one(case, tmp_path, monkeypatch):
    whole = run(case, tmp_path / "whole")
    real = DrafterTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 20:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run(case, tmp_path / "cut")
    monkeypatch.undo()
    resumed = run(case, tmp_path / "cut", resume=True)
    for figure in ("loss", "agreement", "steps"):
        assert resumed[figure] == whole[figure]
    one, other = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# -------------------------------------------------------------------- inputs


def questions(path, count=40):
    path.write_text("".join(json.dumps({"id": f"q{i}", "ask": f"List {i} files."}) + "\n" for i in range(count)))
    return path


@pytest.fixture
def pair(demo):
    """Return the small embedded model in bfloat16, and a function that aligns it with the large one."""
    with embedded("chat_600k") as folder:
        small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def aligned(inputs, out, progress=None, **changes):
        options = replace(OPTIONS, steps=1, evaluations=1, checkpoints=1, learning_rate=1e-4, **changes)
        how = {"answers": AnswerOptions(4, 8), "options": options, "progress": progress, "report": lambda line: None}
        return align_on_inputs(demo.model, demo.tokenizer, small, inputs, out, **how)

    return small, aligned


def test_a_stopped_run_keeps_its_answers_and_the_saved_model_equals_the_one_in_memory(pair, tmp_path):
    small, aligned = pair
    inputs, out = Inputs(questions(tmp_path / "ask.jsonl"), field="ask"), tmp_path / "out"

    def stop(done, total, tokens):
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        aligned(inputs, out, stop)
    assert len((out / "answers" / JOURNAL).read_bytes().splitlines()) == 20
    counts = []
    recipe = aligned(inputs, out, lambda done, total, tokens: counts.append(done))
    assert counts[0] == 21
    assert recipe["options"]["learning_rate"] == 1e-4
    saved = AutoModelForCausalLM.from_pretrained(out).eval()
    assert saved.dtype == small.dtype == torch.bfloat16
    prompt = torch.arange(5, 200)[None]
    with torch.no_grad():
        assert torch.equal(small(prompt).logits, saved(prompt).logits)


def test_other_inputs_are_answered_with_force_only(pair, tmp_path):
    _, aligned = pair
    inputs = Inputs(questions(tmp_path / "ask.jsonl"), field="ask")
    aligned(replace(inputs, limit=36), tmp_path / "out")
    (tmp_path / "out" / "recipe.json").rename(tmp_path / "held")
    with pytest.raises(ValueError, match="holds data with other questions: name another folder, or remove that one"):
        aligned(inputs, tmp_path / "out")
    (tmp_path / "held").rename(tmp_path / "out" / "recipe.json")
    assert aligned(inputs, tmp_path / "out", force=True)["data"]["rows"] == 40


def test_options_of_inputs_are_refused_for_answers(case, tmp_path):
    kind, large, data = case
    for option in ({"limit": 3}, {"field": "ask"}, {"template": "{question}"}):
        with pytest.raises(
            ValueError, match=f"--{next(iter(option))} is for inputs, and .* holds answers: leave it out"
        ):
            align_on_inputs(large, None, small_model(kind), Inputs(data, **option), tmp_path)


# -------------------------------------------------------------------- refusals and the command


def test_pairs_that_do_not_fit_are_refused(case, tmp_path):
    kind, large, data = case
    other = small_model("llama" if kind == "t5" else "t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        align(large, other, data, tmp_path / "out")
    with pytest.raises(ValueError, match="optimizer is 'sgd': choose adafactor or adamw"):
        run(case, tmp_path / "out", optimizer="sgd")
    if kind == "llama":
        wide = AutoModelForCausalLM.from_config(LlamaConfig(**(LIKE | {"vocab_size": 101})))
        with pytest.raises(ValueError, match="a vocabulary of 101 and the large one of 97"):
            align(large, wide, data, tmp_path / "out")
        short = AutoModelForCausalLM.from_config(LlamaConfig(**LIKE, max_position_embeddings=8))
        with pytest.raises(ValueError, match=r"context is 8: leave the long ones out with --max-length 8\."):
            align(large, short, data, tmp_path / "out")
        with pytest.warns(UserWarning, match="no smaller than the large one"):
            run(case, tmp_path / "out", small=construct(MEMBERS[kind]), steps=1, evaluations=1, checkpoints=1)


def test_a_generation_config_that_cannot_be_saved_is_refused_before_training(case, tmp_path):
    small = small_model(case[0])
    small.generation_config.temperature = 0.5  # Without do_sample, Hugging Face does not save it.
    with pytest.raises(ValueError, match="generation_config has settings that Hugging Face does not save") as error:
        run(case, tmp_path / "out", small=small)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    small.generation_config.temperature = None
    small.save_pretrained(tmp_path / "hub")
    config = tmp_path / "hub" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"temperature": 0.5}))
    check_trainable(type(small).from_pretrained(tmp_path / "hub"))  # Published configs can be saved unchanged.


def test_the_command(tmp_path, monkeypatch):
    asked, out = questions(tmp_path / "ask.jsonl"), tmp_path / "out"
    with embedded("chat_600k") as folder:
        words = f"train align --data {asked} --out {out} --max-new-tokens 6 --steps 1 --batch 4 --evaluations 1".split()
        good = ["--small", str(folder), "--field", "ask"]
        for options, message in (
            (["--small", str(folder), "--field", "nope"], "line 1, has no 'nope' with text"),
            ([*good, "--optimizer", "sgd"], "The optimizer is 'sgd'"),
            (["--small", "./missing"], "There is no model folder './missing'"),
        ):
            assert message in str(CliRunner().invoke(app, words + options).exception), options
        assert not out.exists(), "no work was done"

        def stop(*args, **options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("draftree.training.align.make_data", stop)
            stopped = CliRunner().invoke(app, words + good)
        assert f"{out} holds the work so far: the same command continues the answers, --resume the" in stopped.stderr
        done = CliRunner().invoke(app, words + good)
    assert done.exit_code == 0, done.exception
    assert "agreement with the large model" in done.output
    assert (out / "tokenizer.json").is_file()
