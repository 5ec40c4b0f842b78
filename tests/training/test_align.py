"""Alignment: a small model learns what the large one says, goes on after a kill, and stays a stock model."""

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
from draftree.training import align as align_module
from draftree.training.align import Exam, align, align_on_inputs, bleu, template_of
from draftree.training.answers import AnswerOptions
from draftree.training.journal import JOURNAL
from draftree.training.options import Inputs, TrainOptions
from draftree.training.questions import Question
from draftree.training.rows import Row, collate
from draftree.training.trainer import DrafterTrainer
from draftree.training.whole_model import AlignObjective

OPTIONS = TrainOptions(steps=24, batch=8, evaluations=3, checkpoints=4, dev_rows=100, learning_rate=1e-2)
LIKE = {"vocab_size": 97, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def small_model(kind, seed=3):
    """One layer, tied embeddings; of a large model's words, but with weights of its own."""
    start = construct(MEMBERS[kind]).config  # draws from a seed of its own
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
    """A large model and what it said, decoder-only and encoder-decoder."""
    large = construct(MEMBERS[request.param])
    return request.param, large, data_for(large, tmp_path_factory.mktemp("align") / "data")


def run(case, out, **changes):
    kind, large, data = case
    optimizer = changes.pop("optimizer", "adafactor")
    small = changes.pop("small", None) or small_model(kind)
    told = changes.pop("report", lambda line: None)
    return align(large, small, data, out, optimizer=optimizer, options=replace(OPTIONS, **changes), report=told)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("optimizer", few(["adafactor", "adamw"], ["adafactor"]))
def test_a_small_model_comes_to_agree_with_the_large_one(case, tmp_path, optimizer):
    kind, large, _ = case
    before = [p.clone() for p in large.parameters()]
    recipe = run(case, tmp_path, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, large.parameters(), strict=True))
    assert all(p.grad is None for p in large.parameters())
    assert recipe["loss"]["after"] < recipe["loss"]["before"] - 0.1
    assert recipe["agreement"]["after"] >= recipe["agreement"]["before"], "random words: there is little to learn"
    assert recipe == json.loads((tmp_path / "recipe.json").read_text())
    assert (recipe["steps"], recipe["optimizer"], recipe["bleu"]) == (24, optimizer, None)
    assert recipe["base_model"]["hash"] == base_of(large).hash
    rates = json.loads((tmp_path / "checkpoints" / "checkpoint-24" / "trainer_state.json").read_text())["log_history"]
    assert {entry["learning_rate"] for entry in rates if "learning_rate" in entry} == {1e-2}, "it stays as it is"
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    small = auto.from_pretrained(tmp_path)
    assert sum(p.numel() for p in small.parameters()) == recipe["parameters"]
    prompt = torch.tensor([[5, 6, 7, 8]])
    plain = draftree.generate(large, prompt, max_new_tokens=12)
    drafted = draftree.generate(large, prompt, drafter=draftree.DraftModel(small), max_new_tokens=12)
    assert torch.equal(plain.sequences, drafted.sequences)


def test_loss_and_agreement_are_those_of_slow_counting(case):
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


def test_a_killed_run_gives_what_one_piece_gives(case, tmp_path, monkeypatch):
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
    with pytest.raises(ValueError, match="unfinished run: add --resume"):
        run(case, tmp_path / "cut")
    resumed = run(case, tmp_path / "cut", resume=True)
    for figure in ("loss", "agreement", "steps"):
        assert resumed[figure] == whole[figure]
    one, other = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# -------------------------------------------------------------------- inputs and references


def questions(path, count=40):
    rows = [
        {"id": f"q{i}", "ask": f"List {i} files.", "known": "ls" if i % 2 else "ls -a | head"} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_outlive_a_kill_and_references_give_bleu(demo, tmp_path, monkeypatch):
    with embedded("chat_600k") as folder:
        small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).eval()
    data, out = questions(tmp_path / "ask.jsonl"), tmp_path / "out"
    options = replace(OPTIONS, steps=2, learning_rate=1e-4)
    inputs = Inputs(data, field="ask", reference="known")

    def stop(done, total, tokens):
        if done == 20:
            raise KeyboardInterrupt

    more = {"answers": AnswerOptions(8, 8), "options": options, "report": lambda line: None}
    with pytest.raises(KeyboardInterrupt):
        align_on_inputs(demo.model, demo.tokenizer, small, inputs, out, progress=stop, **more)
    assert len((out / "answers" / JOURNAL).read_bytes().splitlines()) == 20
    counts = []
    recipe = align_on_inputs(
        demo.model, demo.tokenizer, small, inputs, out, progress=lambda *so: counts.append(so[0]), **more
    )
    assert counts[0] == 21
    assert recipe["bleu_questions"] + recipe["data"]["trained_on"] <= 40
    assert set(recipe["bleu"]) == {"large", "before", "after"}
    assert recipe["options"]["learning_rate"] == 1e-4
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float16, "stored as it came"
    alone = Exam([], template_of(demo.tokenizer, None), AnswerOptions())
    assert alone.template.kind == "short"


@pytest.fixture
def pair(demo):
    """The embedded models, the small one in bfloat16, and how `align_on_inputs` is called here."""
    with embedded("chat_600k") as folder:
        small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def aligned(inputs, out, *, skip_long=False, **changes):
        options = replace(OPTIONS, steps=1, evaluations=1, checkpoints=1, learning_rate=1e-4, **changes)
        how = {"answers": AnswerOptions(4, 8, skip_long), "options": options, "report": lambda line: None}
        return align_on_inputs(demo.model, demo.tokenizer, small, inputs, out, **how)

    return small, aligned


def test_the_model_in_memory_is_the_saved_one(pair, tmp_path):
    small, aligned = pair
    before = [(buffer, buffer.dtype) for buffer in small.buffers()]
    aligned(Inputs(questions(tmp_path / "ask.jsonl"), field="ask"), tmp_path / "out")
    assert all(now is was and now.dtype == dtype for now, (was, dtype) in zip(small.buffers(), before, strict=True))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    prompt = torch.arange(5, 200)[None]
    with torch.no_grad():
        assert torch.equal(small(prompt).logits, saved(prompt).logits)


def test_references_beyond_the_context(pair, tmp_path):
    _, aligned = pair
    data, dev = questions(tmp_path / "ask.jsonl"), tmp_path / "dev.jsonl"
    dev.write_text("".join(json.dumps({"ask": ask, "known": "ls"}) + "\n" for ask in ("List it.", "word " * 3000)))
    inputs = Inputs(data, field="ask", reference="known", dev=dev)
    with pytest.raises(ValueError, match=r"has .* tokens in its template and the model's context is 2048"):
        aligned(inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "before any work"
    assert aligned(inputs, tmp_path / "out", skip_long=True)["bleu_questions"] == 1


def test_an_exam_leaves_a_model_in_its_mode(demo):
    template = template_of(demo.tokenizer, None)
    exam = Exam([Question(0, "0", "s", ("List it.",), "ls")], template, AnswerOptions(4, 1))
    demo.model.train()
    try:
        exam.bleu(demo.model)
        assert all(module.training for module in demo.model.modules())
    finally:
        demo.model.eval()


def test_other_inputs_are_answered_anew_by_force_alone(pair, tmp_path):
    _, aligned = pair
    inputs = Inputs(questions(tmp_path / "ask.jsonl"), field="ask")
    aligned(replace(inputs, limit=36), tmp_path / "out")
    (tmp_path / "out" / "recipe.json").rename(tmp_path / "held")
    with pytest.raises(ValueError, match="holds data with other questions: name another folder, or remove that one"):
        aligned(inputs, tmp_path / "out")
    (tmp_path / "held").rename(tmp_path / "out" / "recipe.json")
    assert aligned(inputs, tmp_path / "out", force=True)["data"]["rows"] == 40


def test_options_of_inputs_beside_answers(case, tmp_path):
    kind, large, data = case
    for option in ({"limit": 3}, {"field": "ask"}, {"template": "{question}"}):
        with pytest.raises(
            ValueError, match=f"--{next(iter(option))} is for inputs, and .* holds answers: leave it out"
        ):
            align_on_inputs(large, None, small_model(kind), Inputs(data, **option), tmp_path)
    dev = questions(tmp_path / "dev.jsonl")
    Inputs(
        data, field="ask", template="{question}", reference="known", dev=dev
    ).refuse_for_answers()  # they are read so


def test_bleu_is_that_of_its_package():
    texts, known = ["the cat sat on the mat", "a dog"], ["the cat sat on a mat", "a dog runs"]
    from sacrebleu import corpus_bleu

    assert bleu(texts, known) == pytest.approx(corpus_bleu(texts, [known]).score)
    assert bleu(known, known) == pytest.approx(100)


# -------------------------------------------------------------------- what is refused


def test_pairs_that_do_not_fit(case, tmp_path):
    kind, large, data = case
    other = small_model("llama" if kind == "t5" else "t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        align(large, other, data, tmp_path / "out")
    wide = AutoModelForCausalLM.from_config(LlamaConfig(**(LIKE | {"vocab_size": 101})))
    if kind == "llama":
        with pytest.raises(ValueError, match="a vocabulary of 101 and the large one of 97"):
            align(large, wide, data, tmp_path / "out")
    with pytest.raises(ValueError, match="optimizer is 'sgd': choose adafactor or adamw"):
        run(case, tmp_path / "out", optimizer="sgd")
    with pytest.warns(UserWarning, match="no smaller than the large one"):
        run(case, tmp_path / "out", small=construct(MEMBERS[kind]), steps=1, evaluations=1, checkpoints=1)
    with pytest.raises(ValueError, match=r"was made by .* with other weights"):
        align(construct(MEMBERS["llama" if kind == "llama" else "mt5"]).half(), small_model(kind), data, tmp_path / "o")


def test_a_generation_config_that_cannot_be_saved(case, tmp_path):
    """It would stop the run after the training."""
    kind, _, _ = case
    small = small_model(kind)
    small.generation_config.temperature = 0.5  # which is nothing without do_sample
    with pytest.raises(ValueError, match="generation_config has settings that Hugging Face does not save") as error:
        run(case, tmp_path / "out", small=small)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_rows_beyond_the_small_models_context(tmp_path):
    large = construct(MEMBERS["llama"])
    small = AutoModelForCausalLM.from_config(LlamaConfig(**LIKE, max_position_embeddings=8))
    with pytest.raises(ValueError, match=r"context is 8: leave the long ones out with --max-length 8\."):
        align(large, small, data_for(large, tmp_path / "data", 30), tmp_path / "out")


def test_bad_words_on_the_command_line(tmp_path, monkeypatch):
    asked = questions(tmp_path / "ask.jsonl")
    with embedded("chat_600k") as folder:
        base = ["train", "align", "--small", str(folder), "--data", str(asked), "--out", str(tmp_path / "out")]
        for options, word in (
            (["--field", "ask", "--reference", "nope"], "line 1, has no reference: give it 'nope' with text"),
            (["--field", "nope"], "line 1, has no 'nope' with text"),
            (["--field", "ask", "--dev", str(asked)], "--dev is for BLEU, which needs references"),
            (["--optimizer", "sgd"], "The optimizer is 'sgd'"),
            (["--small", "./missing"], "There is no model folder './missing'"),
        ):
            result = CliRunner().invoke(app, base + options)
            assert word in str(result.exception), options
        monkeypatch.setattr(align_module, "find_spec", lambda name: None)
        result = CliRunner().invoke(app, [*base, "--field", "ask", "--reference", "known"])
        assert str(result.exception) == "BLEU needs sacrebleu: pip install -e '.[bench]' in the clone of draftree."
    assert not (tmp_path / "out").exists(), "nothing was done"


def test_ctrl_c_says_how_it_goes_on(tmp_path, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("draftree.training.align.make_data", stop)
    asked = questions(tmp_path / "ask.jsonl")
    with embedded("chat_600k") as folder:
        words = f"train align --small {folder} --data {asked} --out {tmp_path / 'out'} --field ask"
        result = CliRunner().invoke(app, words.split())
    said = f"{tmp_path / 'out'} holds the work so far: the same command continues the answers, --resume the training."
    assert said in result.stderr


def test_the_command(tmp_path):
    asked = questions(tmp_path / "ask.jsonl")
    with embedded("chat_600k") as folder:
        words = f"train align --small {folder} --data {asked} --out {tmp_path / 'out'} --field ask --max-new-tokens 6"
        result = CliRunner().invoke(app, [*words.split(), "--steps", "1", "--batch", "4", "--evaluations", "1"])
    assert result.exit_code == 0, result.exception
    assert "agreement with the large model" in result.output
    assert (tmp_path / "out" / "tokenizer.json").is_file()
