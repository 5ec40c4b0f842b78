"""Test the training of EAGLE-3 and DFlash heads: recorded states, passes, acceptance, resumed runs and folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_driver import data_for, same
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from zoo import MEMBERS, construct

import draftree
from draftree.drafting.published.features import Text
from draftree.drafting.published.layers import Span, States, causal
from draftree.runner.target import inspect_model
from draftree.training.answers import AnswerOptions, make_data
from draftree.training.options import TrainOptions, read_questions, template_of
from draftree.training.recording import Recording
from draftree.training.rows import Batch, collate, read_data
from draftree.training.run import prepare, train
from draftree.training.trainer import DrafterTrainer

SETTINGS = {
    "eagle3": {"depth": 3, "draft_vocab": 60, "embeddings": True},
    "dflash": {"depth": 3, "draft_vocab": 60, "layers": 2},
}
METHODS = list(SETTINGS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a tiny llama, the folder of its data and a folder of its hidden states."""
    model = construct(MEMBERS["llama"])
    folder = tmp_path_factory.mktemp("heads")
    return model, data_for(model, folder / "data", count=90), folder / "states"


@pytest.fixture(scope="module")
def spoken(demo, tmp_path_factory):
    """Return the folder of answers of the embedded model, and one for its hidden states."""
    folder = tmp_path_factory.mktemp("spoken")
    questions = read_questions([Path(draftree.__file__).parent / "data" / "prompts.jsonl"], 72)
    template = template_of(demo.tokenizer, None)
    make_data(*demo, questions, folder / "data", template=template, options=AnswerOptions(40, 8))
    return folder / "data", folder / "states"


def run(made, out, method, **changes):
    model, data, states = made
    report = changes.pop("report", lambda line: None)
    options = TrainOptions(**{"steps": 6, "batch": 8, "evaluations": 1, "checkpoints": 3} | changes)
    return train(method, model, data, out, settings=SETTINGS[method], states=states, options=options, report=report)


def begun(made, method):
    """Return an objective at the beginning of its training, and a batch of two rows."""
    model, data, states = made
    torch.manual_seed(0)
    _, objective = prepare(method, model, SETTINGS[method], {})
    rows = read_data(data, inspect_model(model))
    objective.begin(rows, states, lambda line: None, bf16=False)
    return objective.eval(), Batch(**collate([(row, None) for row in rows.train[3:5]], None))


def test_inputs_of_the_tapped_layers_and_likely_tokens_are_recorded(made, tmp_path, monkeypatch):
    monkeypatch.setattr("draftree.training.recording.SHARD", 20)
    model, data, _ = made
    rows = read_data(data, inspect_model(model))
    every, lines = rows.train + rows.dev, []
    Recording(tmp_path, inspect_model(model), (1, 3), every, bf16=False).complete(lines.append)
    assert "5 of 5 files" in lines[-1]
    written = sorted(tmp_path.iterdir())
    written[2].unlink()
    recording = Recording(tmp_path, inspect_model(model), (1, 3), every, bf16=False)
    recording.complete(lines.append)
    assert "1 of 1 files" in lines[-1]
    for row in every[:5]:
        result = model(torch.tensor([row.tokens]), output_hidden_states=True)
        expected = torch.cat([result.hidden_states[1], result.hidden_states[3]], -1)[0]
        recorded = recording[row.number]
        torch.testing.assert_close(recorded.states.float(), expected, rtol=1e-2, atol=1e-4)
        best = result.logits[0, row.start - 1 :].softmax(-1).topk(16)
        torch.testing.assert_close(recorded.shares.float(), best.values, rtol=1e-2, atol=1e-4)
        assert torch.equal(recorded.ids[:-1, 0], torch.tensor(row.tokens[row.start :]))  # The answer is greedy.
    Recording(tmp_path, inspect_model(model), (1, 2), every, bf16=False).complete(lines.append)
    assert "5 of 5 files" in lines[-1]  # Those of other taps are not taken for them.


@pytest.mark.parametrize("method", METHODS)
def test_a_training_pass_equals_drafting(made, method):
    """Draft the true tokens behind every anchor with the head's own passes, one anchor at a time."""
    objective, batch = begun(made, method)
    texts = objective.texts(batch)
    head, embed = objective.weights, objective.embed
    logits = objective.drafted(texts)
    for first, size, anchor, count in texts.text:
        tokens = texts.tokens[first : first + size]
        features = head.fuse(texts.states[first : first + size].chunk(3, -1))
        for n in range(anchor, anchor + count):
            known = int(texts.place[n]) + 1
            if method == "eagle3":
                states = States()
                span = Span(states, 0, known, causal(0, known, tokens.device))
                out = head(embed(tokens[1 : known + 1]), features[:known], torch.arange(known), [span])
                drafted = [out]
                for depth in range(1, objective.depth):
                    place = torch.tensor([known - 1 + depth])
                    token = texts.ahead[n, depth : depth + 1]
                    fed = head.fed_back(drafted[-1][-1:])
                    drafted.append(head(embed(token), fed, place, [Span(states, known - 1 + depth, 1, None)]))
                expected = [head.lm_head(head.head_input(out[-1])) for out in drafted]
            else:
                text = Text(tokens=[], count=known)
                text.features.put(0, features[:known])
                head.read(text)
                block = torch.tensor(
                    [int(tokens[known]), *[objective.trained.config["mask_token_id"]] * objective.depth]
                )
                expected = list(head.lm_head(head.block(embed(block), [text])[1:]))
            for own, other in zip(logits, expected, strict=True):
                torch.testing.assert_close(own[n], other, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_cross_entropy_with_the_models_probabilities(made):
    objective, batch = begun(made, "eagle3")
    texts = objective.texts(batch)
    logits, known = objective.drafted(texts), objective.trained.vocabulary
    for depth, own in enumerate(logits):
        losses = []
        for first, size, anchor, count in texts.text:
            rows = made[0](texts.tokens[None, first : first + size]).logits[0].softmax(-1)
            for n in range(anchor, anchor + count):
                after = int(texts.place[n]) + 1 + depth  # the row that predicts what this depth drafts
                if after < size - 1:
                    best = rows[after].topk(16)
                    shares = torch.zeros_like(rows[after]).scatter(0, best.indices, best.values)[known]
                    losses.append(-(shares * own[n].log_softmax(-1)).sum())
        torch.testing.assert_close(objective.loss(texts, depth, own), torch.stack(losses).mean(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("method", "steps"), [("eagle3", 40), ("dflash", 100)])
def test_a_trained_head_accepts_more_than_with_its_layers_in_reverse(demo, spoken, method, steps, tmp_path):
    data, states = spoken
    options = TrainOptions(steps=steps, batch=4, learning_rate=2e-3, evaluations=1, checkpoints=1)
    settings = SETTINGS[method] | {"draft_vocab": 1024}
    quiet = {"states": states, "options": options, "report": lambda line: None}
    train(method, demo.model, data, tmp_path / "head", settings=settings, **quiet)
    curve = json.loads((tmp_path / "head" / "curve.json").read_text())["dev_loss"]
    assert curve[-1][1] < 0.6 * curve[0][1]
    shutil.copytree(tmp_path / "head", tmp_path / "reversed")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    key = next(key for key in config if key.endswith("hidden_state_layer_ids"))
    config[key].reverse()
    (tmp_path / "reversed" / "config.json").write_text(json.dumps(config))
    rows = read_data(data, inspect_model(demo.model)).train[:12]
    accepted = {}
    for name in ("head", "reversed"):
        drafter, fixed = draftree.load_drafter(tmp_path / name, demo.model), draftree.Fixed(6)
        stats = [
            draftree.generate(
                demo.model, torch.tensor([row.tokens[: row.start]]), drafter=drafter, shape=fixed, max_new_tokens=32
            ).stats.requests[0]
            for row in rows
        ]
        accepted[name] = sum(one.accepted for one in stats) / sum(one.steps for one in stats)
    assert accepted["head"] > 0.15
    assert accepted["head"] > 1.05 * accepted["reversed"]


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_an_uninterrupted_one(made, tmp_path, monkeypatch, method):
    whole = run(made, tmp_path / "whole", method)
    real = DrafterTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path / "cut", method)
    monkeypatch.undo()
    recipe = run(made, tmp_path / "cut", method, resume=True)
    assert recipe["accuracy"] == whole["accuracy"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole")]
    assert same(*weights)
    assert weights[0]["fc.weight"].dtype == torch.float16
    known = weights[0]["d2t"] + torch.arange(60)
    assert ("embed_tokens.weight" in weights[0]) == (method == "eagle3")
    assert torch.equal(weights[0]["t2d"].nonzero()[:, 0], known)


def test_training_goes_on_from_a_trained_head(made, tmp_path):
    run(made, tmp_path / "head", "eagle3")
    model, data, states = made
    settings = {"source": tmp_path / "head", "depth": 3}
    trained, objective = prepare("eagle3", model, settings, {})
    objective.begin(read_data(data, inspect_model(model)), states, lambda line: None, bf16=False)
    before = load_file(tmp_path / "head" / "model.safetensors")
    for name, tensor in trained.weights.state_dict().items():
        torch.testing.assert_close(tensor, before[name].float(), rtol=0, atol=0)
    options = TrainOptions(steps=4, batch=8, evaluations=2, checkpoints=1)
    quiet = {"states": states, "options": options, "report": lambda line: None}
    train("eagle3", model, data, tmp_path / "more", settings=settings, **quiet)
    first, more = (json.loads((tmp_path / name / "curve.json").read_text())["dev_loss"] for name in ("head", "more"))
    assert more[-1][1] < first[-1][1] < first[0][1]
    after = load_file(tmp_path / "more" / "model.safetensors")
    assert torch.equal(after["d2t"], before["d2t"])
    assert torch.equal(after["embed_tokens.weight"], before["embed_tokens.weight"])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("head", "more")]
    assert configs[0] == configs[1]


def test_a_head_that_training_cannot_go_on_from_is_refused(made, tmp_path):
    model, *_ = made
    with pytest.raises(ValueError, match="holds no EAGLE-3 head"):
        prepare("eagle3", model, {"source": tmp_path}, {})
    with pytest.raises(ValueError, match="There is no drafter folder"):
        prepare("eagle3", model, {"source": str(tmp_path / "missing")}, {})
    shipped = Path(draftree.__file__).parent / "data" / "drafters" / "eagle-3"
    with pytest.raises(ValueError, match="was made for a model with hidden_size 576"):
        prepare("eagle3", model, {"source": shipped}, {})


@pytest.mark.parametrize("method", METHODS)
def test_what_no_head_can_be_trained_for_is_refused(method):
    with pytest.raises(ValueError, match=r"decoder-only models.*this 't5' model is none"):
        prepare(method, construct(MEMBERS["t5"]), {}, {})
    with pytest.raises(ValueError, match="draft_vocab is 1: give at least 2"):
        prepare(method, construct(MEMBERS["llama"]), {"draft_vocab": 1}, {})
    with pytest.raises(ValueError, match="models with attention"):
        prepare(method, construct(MEMBERS["falcon_mamba"]), {}, {})
    with pytest.raises(ValueError, match="decay is 2: give a number over 0 and at most 1"):
        prepare(method, construct(MEMBERS["llama"]), {}, {"decay": 2})


def test_a_head_for_layers_of_different_widths(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8}
    torch.manual_seed(0)
    config = Gemma4TextConfig(vocab_size=97, vocab_size_per_layer_input=97, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    made = model, data_for(model, tmp_path / "data", count=30), tmp_path / "states"
    run(made, tmp_path / "head", "eagle3", steps=2, batch=2, checkpoints=1)
    ids = torch.arange(5, 15)[None]
    plain = draftree.generate(model, ids, max_new_tokens=12).sequences
    drafter = draftree.load_drafter(tmp_path / "head", model)
    assert torch.equal(draftree.generate(model, ids, max_new_tokens=12, drafter=drafter).sequences, plain)
