"""The trainer: it learns, leaves the base model unchanged, stops at a NaN, and runs in two processes."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training_driver import METHODS, OPTIONS, data_for, run, weights_of
from typer.testing import CliRunner
from zoo import MEMBERS, construct

import draftree
from draftree.cli import app
from draftree.drafting.folder import model_hash
from draftree.pruning.early import EarlyHead
from draftree.training.answers import AnswerOptions, make_data
from draftree.training.objectives import RANKS, MedusaObjective, hits_of
from draftree.training.options import Question, Template, TrainOptions
from draftree.training.rows import Batch, ByLength, Row, RowSet, collate
from draftree.training.run import prepare, train
from draftree.training.trainer import BadLossError, DrafterTrainer, arguments

# -------------------------------------------------------------------- a run


@pytest.mark.parametrize("method", METHODS)
def test_a_run_learns_and_records_its_figures(zoo_data, tmp_path, method):
    model, _ = zoo_data
    before = model_hash(model)
    flags = [p.requires_grad for p in model.parameters()]
    lines = []
    recipe = run(zoo_data, tmp_path, method, steps=30, learning_rate=1e-2, dev_rows=100, report=lines.append)
    assert model_hash(model) == before
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert curve["dev_loss"][0][0] == 0
    assert curve["dev_loss"][-1] == [30, recipe["dev_loss"]]
    assert recipe["dev_loss"] < curve["dev_loss"][0][1], "it has learned"
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "recipe.json").read_text()) == json.loads(json.dumps(recipe))
    assert recipe["steps"] == 30
    assert 0 < recipe["cpu_seconds"] < recipe["seconds"] * (torch.get_num_threads() + 1)
    assert recipe["base_model"]["hash"] == before
    for name, value in METHODS[method].items():
        assert recipe["settings"][name] == value
    for shares in recipe["accuracy"].values():
        assert len(shares) == len(RANKS)
        assert shares == sorted(shares)
        assert 0 <= shares[0] <= shares[-1] <= 1
    assert sum("dev loss" in line for line in lines) == 3
    if method == "early-head":
        held = EarlyHead.from_pretrained(tmp_path, model)
    else:
        held = draftree.load_drafter(tmp_path, model)
        prompt = torch.tensor([[5, 6, 7, 8]])
        plain = draftree.generate(model, prompt, max_new_tokens=16, eos_token_id=[])
        drafted = draftree.generate(model, prompt, drafter=held, max_new_tokens=16, eos_token_id=[])
        assert torch.equal(plain.sequences, drafted.sequences)
    assert held.base.hash == before
    assert held.recipe["steps"] == 30


@pytest.mark.parametrize(
    ("method", "settings", "places"),
    [("medusa", {"heads": 2}, (2, 3)), ("early-head", {"layer": 2, "places": 3}, (1, 2, 3))],
)
def test_dev_accuracy_equals_slow_counting(zoo_data, method, settings, places):
    """Compare top-k shares and the loss with a loop over cases, with ties and padded splits."""
    model, _ = zoo_data
    _, objective = prepare(method, model, settings, {})
    rows = [Row(tuple(range(5, 18)), 4), Row(tuple(range(20, 27)), 3)]
    inputs = collate([(row, None) for row in rows], None)
    with torch.no_grad():
        out = objective.eval()(**inputs)
        _, logits = objective.measure(Batch(**inputs))
    total = 0.0
    for depth, place in enumerate(places):
        hits, seen, loss = [0] * len(RANKS), 0, 0.0
        for b, row in enumerate(rows):
            for s, split in enumerate(range(row.start - 1, len(row) - 2)):
                if split + place >= len(row):
                    continue
                seen += 1
                case = logits[depth][b, s]
                loss -= float(case.log_softmax(-1)[row.tokens[split + place]])
                better = int((case > case[row.tokens[split + place]]).sum())
                hits = [h + (better < k) for h, k in zip(hits, RANKS, strict=True)]
        assert out["hits"][depth].tolist() == hits
        assert int(out["seen"][depth]) == seen
        total += loss / seen
    assert len(logits) == len(places)
    assert float(out["loss"]) == pytest.approx(total, rel=1e-4)


def test_accumulated_passes_are_one_step(zoo_data, tmp_path):
    """Four rows in one pass, or two rows in each of two passes, give the same gradient."""
    model, _ = zoo_data
    rows = [Row(tuple(range(5 + i, 17 + i)), 4) for i in range(4)]
    grads = []
    for parts in ([rows], [rows[:2], rows[2:]]):
        torch.manual_seed(0)
        trained, objective = prepare("medusa", model, {"heads": 2}, {})
        for part in parts:
            loss = objective.train()(**collate([(row, None) for row in part], None))["loss"]
            (loss / len(parts)).backward()
        grads.append([p.grad for p in trained.weights.parameters()])
    model.zero_grad(set_to_none=True)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    recipe = run(zoo_data, tmp_path, accumulate=2, batch=2)
    assert recipe["steps"] == OPTIONS.steps


# -------------------------------------------------------------------- rows in batches


def test_every_row_occurs_once_an_epoch_in_batches_of_similar_lengths():
    rows = [Row(tuple(range(5 + 7 * i % 40)), 2) for i in range(203)]
    sampler = ByLength(rows, 4, seed=1)
    keys = list(sampler)
    assert sorted(keys) == list(range(203))
    assert keys == list(ByLength(rows, 4, seed=1))
    sampler.set_epoch(2)
    later = list(sampler)
    assert sorted(k - 2 * 203 for k in later) == list(range(203))
    assert [k - 2 * 203 for k in later] != keys
    spread = [
        max(len(rows[k]) for k in keys[i : i + 4]) - min(len(rows[k]) for k in keys[i : i + 4])
        for i in range(0, 200, 4)
    ]
    assert sum(spread) / len(spread) < 4
    held = RowSet(rows, windows=True)
    assert held[205] == (rows[2], 205)
    assert RowSet(rows, windows=False)[2] == (rows[2], None)


def test_split_windows_lie_in_the_answer_and_differ_by_epoch():
    row = Row(tuple(range(60)), 10)
    firsts = set()
    for seed in range(50):
        batch = Batch(**collate([(row, seed)], 16))
        splits = batch.splits[0].tolist()
        assert splits == list(range(splits[0], splits[0] + 16))
        assert row.start - 1 <= splits[0] <= splits[-1] <= len(row) - 3
        firsts.add(splits[0])
    assert len(firsts) > 15
    assert Batch(**collate([(row, None)], 16)).splits[0, 0] == row.start - 1


# -------------------------------------------------------------------- labels and ranks

ROWS = [Row(tuple(range(5, 17)), 4), Row(tuple(range(20, 27)), 3)]


@pytest.mark.parametrize(
    ("method", "settings", "nearest"),
    [("early-head", {"layer": 2, "places": 2}, 1), ("medusa", {"heads": 2}, 2), ("bita", {"masks": 2}, 2)],
)
def test_every_token_of_an_answer_is_a_label(tmp_path, method, settings, nearest):
    """Include the last token, which is mostly EOS."""
    _, objective = prepare(method, construct(MEMBERS["llama"]), settings, {})
    args = arguments(tmp_path, len(ROWS), TrainOptions(steps=1), torch.device("cpu"), learning_rate=1e-3)
    trainer = DrafterTrainer(objective, args, ROWS, ROWS, lambda line: None)
    batch = Batch(**trainer.data_collator([(row, None) for row in ROWS]))
    tokens, there = objective.truths(batch)[0]
    for b, row in enumerate(ROWS):
        assert tokens[b][there[b]].tolist() == list(row.tokens[row.start - 1 + nearest :])


def test_the_lower_of_two_tokens_with_equal_logits_is_the_better_one():
    """Rank as decoding does: a flat prediction is right about token 0 only."""
    logits = torch.zeros(1, 4, 30, dtype=torch.bfloat16)
    logits[0, 3, 9] = 1.0
    hits, seen = hits_of(logits, torch.tensor([[0, 1, 20, 9]]), torch.ones(1, 4, dtype=torch.bool))
    assert int(seen) == 4
    best = logits.argmax(-1)[0].tolist()
    assert best == [0, 0, 0, 9]
    assert hits[RANKS.index(1)] == 2
    assert hits[RANKS.index(2)] == 3
    assert hits[RANKS.index(20)] == 3
    assert hits[RANKS.index(50)] == 4


# -------------------------------------------------------------------- errors


def test_a_nan_stops_the_run_and_keeps_the_last_good_checkpoint(zoo_data, tmp_path, monkeypatch):
    real = MedusaObjective.measure
    calls = []

    def spoil(self, batch):
        loss, logits = real(self, batch)
        calls.append(self.training)
        return (loss * math.nan if calls.count(True) == 5 else loss), logits

    monkeypatch.setattr(MedusaObjective, "measure", spoil)
    with pytest.raises(BadLossError, match=r"The loss is not finite at step 5.*checkpoint-3.*lower learning rate"):
        run(zoo_data, tmp_path)
    assert not (tmp_path / "drafter.safetensors").exists()
    assert [p.name for p in (tmp_path / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]


def test_weights_that_are_not_finite_are_not_saved(zoo_data, tmp_path):
    with pytest.raises(BadLossError, match=r"A weight is not finite at step 2.*checkpoint-1:"):
        run(zoo_data, tmp_path, learning_rate=1e39, checkpoints=6)
    kept = list((tmp_path / "checkpoints").glob("checkpoint-*"))
    assert [p.name for p in kept] == ["checkpoint-1"]
    assert all(t.isfinite().all() for t in load_file(kept[0] / "model.safetensors").values())


def test_bad_options_are_one_sentence(zoo_data, tmp_path):
    model, data = zoo_data

    def refused(match, method="medusa", error=ValueError, settings=None, training=None, **changes):
        def start():
            options = replace(OPTIONS, **changes)
            train(method, model, data, tmp_path / "x", settings=settings, training=training, options=options)

        with pytest.raises(error, match=match) as caught:
            start()
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "x").exists()

    refused("masks is 0", "bita", settings={"masks": 0})
    refused("prompts is -1", "bita", settings={"prompts": -1})
    refused("prefix_dropout is 1", "bita", training={"prefix_dropout": 1})
    refused("transfer_layers is empty", "hidden-transfer", settings={"transfer_layers": []})
    refused("give layers from 1 to 3", "hidden-transfer", settings={"transfer_layers": [2, 4]})
    refused("heads is 0", settings={"heads": 0})
    refused("layer is 9: the model has 4", "early-head", settings={"layer": 9})
    refused("places is 0: give at least 1", "early-head", settings={"layer": 2, "places": 0})
    refused("decay is 0", training={"decay": 0})
    refused("no option 'prefix_dropuot'", "bita", TypeError, training={"prefix_dropuot": 0.1})
    refused("no method 'medussa'.*Did you mean 'medusa'", "medussa")
    refused("steps is 0", steps=0)
    refused("batch is 0", batch=0)
    refused("learning_rate is -1", learning_rate=-1)
    refused("0 rows to train on", max_length=5)


# -------------------------------------------------------------------- the command, and two processes


def test_the_command_trains_on_the_embedded_model(demo, tmp_path):
    questions = [Question(i, str(i), "s", (f"Write {i} words.",)) for i in range(24)]
    how = {"template": Template("short", demo.tokenizer), "options": AnswerOptions(max_new_tokens=8, slots=8)}
    make_data(demo.model, demo.tokenizer, questions, tmp_path / "d", **how)
    common = ["--data", str(tmp_path / "d"), "--out", str(tmp_path / "o"), "--steps", "2", "--dev-rows", "2", "--half"]
    done = CliRunner().invoke(app, ["train", "hidden-transfer", *common, "--layer", "4", "--layer", "6", "--on-pseudo"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "top-1 on the dev rows" in done.output
    assert "73,728 parameters" in done.output
    held = draftree.load_drafter(tmp_path / "o", demo.model)
    assert held.settings["transfer_layers"] == [4, 6]
    assert {t.dtype for t in weights_of(tmp_path / "o").values()} == {torch.float16}
    assert json.loads((tmp_path / "o" / "recipe.json").read_text())["training"] == {"on_pseudo": True}


LAUNCHED = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from zoo import MEMBERS, construct
from draftree.training.options import TrainOptions
from draftree.training.run import prepare, train
options = TrainOptions(steps=4, batch=int(sys.argv[3]), evaluations=1, checkpoints=2, dev_rows=6)
recipe = train("bita", construct(MEMBERS["llama"]), Path(sys.argv[1]), Path(sys.argv[2]),
               settings={"prompts": 4, "masks": 2}, training={"prefix_dropout": 0.0}, options=options)
assert recipe["processes"] == int(sys.argv[4])
"""


@pytest.mark.slow
def test_two_processes_train_as_one(zoo_data, tmp_path):
    """Compare two processes of 2 rows under `accelerate launch` with one process of 4."""
    data = data_for(zoo_data[0], tmp_path / "data", lengths=1)  # Each row has the same weight in both runs.
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    tests = os.path.dirname(os.path.dirname(__file__))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": tests, "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    options = {"env": env, "capture_output": True, "text": True, "timeout": 280}
    for start, name, rows, processes in ((launch, "two", "2", "2"), ([sys.executable], "one", "4", "1")):
        done = subprocess.run([*start, str(script), str(data), str(tmp_path / name), rows, processes], **options)
        assert done.returncode == 0, done.stderr[-3000:]
    for name, tensor in weights_of(tmp_path / "one").items():
        torch.testing.assert_close(weights_of(tmp_path / "two")[name], tensor, atol=2e-3, rtol=2e-2)
    recipes = [json.loads((tmp_path / name / "recipe.json").read_text()) for name in ("one", "two")]
    assert recipes[0]["cases"] == recipes[1]["cases"]
