"""Test that a stopped run resumes exactly, that a finished result is replaced on request only, and the run options."""

import json
from pathlib import Path

import pytest
import torch
from few import few
from training_driver import run, same, weights_of
from transformers.trainer_utils import get_last_checkpoint
from typer.testing import CliRunner

from draftree.cli import app
from draftree.training.objectives import MedusaObjective
from draftree.training.options import TrainOptions, check_out
from draftree.training.rows import spread
from draftree.training.trainer import DrafterTrainer


@pytest.mark.parametrize("method", few(["bita", "medusa"], ["bita"]))
def test_a_resumed_run_equals_an_uninterrupted_one(zoo_data, tmp_path, monkeypatch, method):
    """Stop in the second epoch; rows, split windows, dropout and learning rate continue.

    As in several processes, accelerate does not set the epoch of the rows' order.
    """
    settings = {"steps": None, "epochs": 2, "batch": 8, "checkpoints": 7, "splits": 3}
    whole = run(zoo_data, tmp_path / "whole", method, **settings)
    real = DrafterTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == whole["steps"] - 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run(zoo_data, tmp_path / "cut", method, **settings)
    monkeypatch.undo()
    assert not (tmp_path / "cut" / "recipe.json").exists()
    saved = get_last_checkpoint(str(tmp_path / "cut" / "checkpoints"))
    before = json.loads((Path(saved) / "trainer_state.json").read_text())["log_history"][-1]["cpu_seconds"]
    with pytest.raises(ValueError, match="unfinished run: add --resume"):
        run(zoo_data, tmp_path / "cut", method, **settings)
    monkeypatch.setattr("accelerate.data_loader.DataLoaderShard.set_epoch", lambda self, epoch: None)
    recipe = run(zoo_data, tmp_path / "cut", method, **settings, resume=True)
    assert recipe["steps"] == whole["steps"]
    assert recipe["cpu_seconds"] > before > 0
    assert recipe["accuracy"] == whole["accuracy"]
    assert same(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))
    for out in (tmp_path / "cut", tmp_path / "new"):
        with pytest.raises(ValueError, match="holds no unfinished run with a checkpoint: leave --resume out"):
            run(zoo_data, out, method, **settings, resume=True)


def test_a_finished_run_is_replaced_on_request_only(zoo_data, tmp_path):
    first = run(zoo_data, tmp_path / "o", seed=1)
    held = weights_of(tmp_path / "o")
    with pytest.raises(ValueError, match="holds a finished result: give another folder, or --force to replace it"):
        run(zoo_data, tmp_path / "o", seed=2)
    assert json.loads((tmp_path / "o" / "recipe.json").read_text()) == json.loads(json.dumps(first))
    assert all(torch.equal(a, b) for a, b in zip(held.values(), weights_of(tmp_path / "o").values(), strict=True))
    again = run(zoo_data, tmp_path / "o", seed=2, force=True)
    assert again["options"]["seed"] == 2
    assert not same(held, weights_of(tmp_path / "o"))
    assert "force" not in again["options"]


@pytest.mark.parametrize("verb", ["bita", "hidden-transfer", "medusa", "early-head", "align"])
def test_the_command_line_checks_the_folder_first(verb, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "recipe.json").write_text("{}")
    own = ["--small", "nowhere"] if verb == "align" else []
    arguments = ["train", verb, "--data", "nowhere", "--out", str(tmp_path / "o"), *own]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ValueError)
    assert "holds a finished result: give another folder, or --force to replace it" in str(done.exception)
    done = CliRunner().invoke(app, [*arguments, "--force"])
    assert "holds a finished result" not in str(done.exception)


@pytest.mark.parametrize(("bf16", "mixed"), [(False, False), (True, True), (None, True)])
def test_the_option_of_mixed_precision_overrides_accelerate(bf16, mixed, zoo_data, tmp_path, monkeypatch):
    found = set()
    measure = MedusaObjective.measure

    def seen(self, batch):
        found.add(torch.is_autocast_enabled("cpu"))
        return measure(self, batch)

    monkeypatch.setattr(MedusaObjective, "measure", seen)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    recipe = run(zoo_data, tmp_path, bf16=bf16)
    assert (found, recipe["machine"]["bf16"]) == ({mixed}, mixed)


def test_contradicting_options_are_refused():
    assert (TrainOptions().passes, TrainOptions(epochs=2).passes) == (4, 2)
    with pytest.raises(ValueError, match="steps and epochs both set the length of a training: give one of them"):
        TrainOptions(steps=10, epochs=1)
    with pytest.raises(ValueError, match="resume continues a run and force replaces it"):
        TrainOptions(resume=True, force=True)


@pytest.mark.parametrize("name", ["config.json", "draftree_config.json"])
def test_a_model_or_drafter_of_another_source_is_not_replaced(name, tmp_path):
    (tmp_path / name).write_text("{}")
    for force in (False, True):
        with pytest.raises(ValueError, match="holds a model or drafter that no training here has left"):
            check_out(tmp_path, force=force)


def test_rows_are_taken_evenly():
    assert spread([*"aaabbbccc"], 3) == [*"abc"]
    assert spread([*"ab"], 5) == [*"ab"]
    assert spread([], 5) == []
